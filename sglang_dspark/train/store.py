"""Generated text with the target's hidden states: what one sample holds, and shards of samples on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One answer of the target to one prompt; T tokens, the first `prompt_tokens` of them the prompt.

    tokens int32 [T]; aux float16 [T - 1, aux], the captured hidden states of tokens 0 .. T - 2; final float16
    [T - 2 - first, hidden], the target's last hidden state after its final norm at tokens first + 1 .. T - 2 (the head
    makes logits of it). `first` is the first pair a chain can be trained from: the prompt is text, too, but for
    the part of the chat template that all prompts share. float16 rounds far below what the draft can tell apart.
    """

    tokens: Tensor
    aux: Tensor
    final: Tensor
    prompt_tokens: int
    first: int
    domain: str
    temperature: float


def save_shard(path: Path, samples: list[Sample]) -> None:
    """Write whole or not at all: a shard that exists is complete."""
    meta = [[s.tokens.numel(), s.prompt_tokens, s.first, s.domain, s.temperature] for s in samples]
    flat = {name: torch.cat([getattr(s, name) for s in samples]) for name in ("tokens", "aux", "final")}
    scratch = path.with_suffix(".partial")
    save_file(flat, scratch, metadata={"samples": json.dumps(meta)})
    scratch.rename(path)


def load_shard(path: Path) -> list[Sample]:
    """The samples of a shard, as views of memory-mapped tensors."""
    with safe_open(path, "pt") as file:
        meta = json.loads(file.metadata()["samples"])
        flat = {name: file.get_tensor(name) for name in ("tokens", "aux", "final")}
    sizes = [total for total, *_ in meta]
    tokens = flat["tokens"].split(sizes)
    aux = flat["aux"].split([size - 1 for size in sizes])
    final = flat["final"].split([total - 2 - first for total, _, first, *_ in meta])
    return [
        Sample(t, a, f, prompt, first, domain, temperature)
        for t, a, f, (_, prompt, first, domain, temperature) in zip(tokens, aux, final, meta, strict=True)
    ]


def load_samples(shards: list[Path]) -> list[Sample]:
    """Every sample of the shards, in their order."""
    return [sample for path in shards for sample in load_shard(path)]
