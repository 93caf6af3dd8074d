#!/bin/sh
# The shipped draft and its confidence head from prompts alone: sh examples/smollm2/train.sh PROMPTS OUT
# Four fits, each going on from the one before. The first takes the target's answers, but for the last three of 15
# batches, which its own head learns from; the second those three and three batches of dialogues that the target writes
# itself; the third and fourth other dialogues. Of these three the last two batches are kept from the draft for its head.
set -eu
prompts=$1 out=$2 target=build/smollm2-135m
test -e $target/config.json || python -m examples.smollm2.convert --out $target
fit() { sglang-dspark train --target $target --prompts "$prompts" "$@"; }
fit --out build/smollm2-draft-1
fit --out build/smollm2-draft-2 --start-from build/smollm2-draft-1 --known-batches 12 --variations 5 --head-batches 2 \
    --epochs 4 --learning-rate 1e-3 --prompt-share 0.15 --workers 1
more="--batches 0 --variations-seed 1 --head-batches 2 --epochs 2 --learning-rate 8e-4 --prompt-share 0.15"
fit --out build/smollm2-draft-3 --start-from build/smollm2-draft-2 $more --variations 16 --rollout-steps 5
fit --out "$out" --start-from build/smollm2-draft-3 $more --variations 28 --known-batches 14 --rollout-steps 5
