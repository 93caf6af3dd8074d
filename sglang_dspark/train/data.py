"""Prompts: reading them, naming their domain, and deciding which are left out of training."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

# Which kind of text a prompt file holds, by the file's name; any other file is a domain of its own.
DOMAINS = {
    "humaneval": "code",
    "mbpp": "code",
    "livecodebench": "code",
    "gsm8k": "math",
    "math": "math",
    "arena-hard": "chat",
}


@dataclass(frozen=True)
class Prompt:
    """One first user message and where it came from."""

    text: str
    source: str

    @property
    def domain(self) -> str:
        return DOMAINS.get(self.source, self.source)


def read_prompts(path: Path) -> list[Prompt]:
    """The distinct first turns of a JSONL file, or of every `*.jsonl` in a folder, in file and line order.

    Each line is `{"turns": [first user message, ...]}`. ValueError names the line that is not.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no *.jsonl file with prompts in it")
    prompts: dict[str, Prompt] = {}
    for file in files:
        # Lines of bytes: in text, Unicode's own line ends would cut a line in two, and JSON may hold them.
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            text = first_turn(line)
            if text is None:
                raise ValueError(f'{file}:{number}: expected {{"turns": ["first message", ...]}}; mend or drop it')
            prompts.setdefault(text, Prompt(text, file.stem))
    return list(prompts.values())


def first_turn(line: bytes) -> str | None:
    """The first user message of a JSONL line; None where there is none, or no text that can be encoded."""
    try:
        turns = json.loads(line)["turns"]
        if not isinstance(turns, list) or not isinstance(turns[0], str):
            return None
        turns[0].encode()  # JSON can write half of a surrogate pair
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return turns[0] or None


def unit_hash(text: str, salt: str) -> float:
    """A number in [0, 1) that depends on the text and the salt only: the first 8 bytes of SHA-256 of "salt:text"."""
    digest = hashlib.sha256(f"{salt}:{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_left_out(text: str, fraction: float, seed: int) -> bool:
    """Whether a prompt is kept for measuring: a rule on its text alone, so that anybody can repeat the split."""
    return unit_hash(text, f"left-out-{seed}") < fraction


def digest(prompts: list[Prompt]) -> str:
    """SHA-256 (hex) of the prompts, in order: names the data in metrics and in the cache of generated text."""
    state = hashlib.sha256()
    for prompt in prompts:
        state.update(f"{prompt.source}\0{prompt.text}\0".encode())
    return state.hexdigest()
