"""Prompts as a target sees them: token ids under its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tokenise(texts: list[str], target: Path) -> tuple[list[list[int]], Any]:
    """Token ids of each user message under ``target``'s chat template, and the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, tokenize=False)
        for t in texts
    ]
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats], tokenizer
