#!/bin/sh
# The shipped draft and its confidence head from prompts alone: sh examples/smollm2/train.sh PROMPTS OUT
# Two fits. The first takes the target's answers, but for the last three of 15 batches, which its own head learns from;
# the second goes on with those three and with three batches of dialogues that the target writes itself. Two more of
# those teach the head of the second, which has seen none of them.
set -eu
prompts=$1 out=$2 target=build/smollm2-135m
test -e $target/config.json || python -m examples.smollm2.convert --out $target
sglang-dspark train --target $target --prompts "$prompts" --out build/smollm2-draft-1
sglang-dspark train --target $target --prompts "$prompts" --out "$out" \
    --start-from build/smollm2-draft-1 --known-batches 12 --variations 5 --head-batches 2 \
    --epochs 4 --learning-rate 1e-3 --prompt-share 0.15 --workers 1
