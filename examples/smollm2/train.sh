#!/bin/sh
# A draft like the shipped one, and its confidence head, from prompts alone: sh examples/smollm2/train.sh PROMPTS OUT
# One fit, to answers to real prompts and to 36 batches of dialogues that the target writes itself; two more are kept
# from the draft for its head. README.md beside this file has times, memory, disk and what came of it.
set -eu
prompts=$1 out=$2 target=build/smollm2-135m
test -e $target/config.json || python -m examples.smollm2.convert --out $target
sglang-dspark train --target $target --prompts "$prompts" --out "$out" --batches 6 --variations 38 --variations-seed 1 \
    --head-batches 2 --epochs 3 --rollout-steps 5 --prompt-share 0.15
