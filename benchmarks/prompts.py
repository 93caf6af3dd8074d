"""Prompts as a target sees them: token ids under its chat template."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.launch import CPU_ENVIRONMENT
from sglang_dspark.engine import cpu
from sglang_dspark.train.data import Prompt, is_left_out


def tokenise(texts: list[str], target: Path) -> tuple[list[list[int]], Any]:
    """Token ids of each user message under ``target``'s chat template, and the tokenizer."""
    os.environ.update(CPU_ENVIRONMENT)
    cpu.install()  # a PyPI torchvision beside a CPU torch keeps transformers from importing without it
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, tokenize=False)
        for t in texts
    ]
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats], tokenizer


def choose(prompts: list[Prompt], left_out: float, limit: int) -> list[Prompt]:
    """At most ``limit`` prompts of each domain, of those that the training's rule left out (seed 0).

    Raises:
        SystemExit: there is none, in one sentence.
    """
    found: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        if left_out >= 1 or is_left_out(prompt.text, left_out, 0):
            found[prompt.domain].append(prompt)
    if not found:
        raise SystemExit(f"None of {len(prompts)} prompts is in the left-out share {left_out}; give --prompts more.")
    return [prompt for rows in found.values() for prompt in rows[:: max(len(rows) // limit, 1)][:limit]]
