"""Prompts as a target sees them: token ids under its chat template."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.launch import CPU_ENVIRONMENT
from sglang_dspark.engine import cpu


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
