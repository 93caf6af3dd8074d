"""Which target tokens the draft can propose: the likeliest in generated text, smoothed by general frequency."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.train.store import Sample

# Weight of the general prior, in tokens of text. Chosen on held-back training prompts; see choose_draft_tokens.
PRIOR_TOKENS = 20_000.0
# A BPE vocabulary is in order of merge, so of falling frequency in general text; Zipf's law gives the shape.
ZIPF_OFFSET = 100.0


def token_counts(samples: list[Sample], vocab: int) -> Tensor:
    """How often each target token stands in the answers, float64 [vocab]."""
    counts = torch.zeros(vocab, dtype=torch.float64)
    for sample in samples:
        counts += torch.bincount(sample.tokens[sample.prompt_tokens :].long(), minlength=vocab)
    return counts


def choose_draft_tokens(counts: Tensor, size: int, prior_tokens: float = PRIOR_TOKENS) -> Tensor:
    """The `size` target tokens of highest smoothed frequency, int64 ascending.

    Counts alone leave out too much: tokens frequent everywhere but by chance not in a small training text. The prior
    falls as 1 / (merge rank + offset).
    """
    prior = 1.0 / (torch.arange(counts.numel(), dtype=torch.float64) + ZIPF_OFFSET)
    score = counts + prior_tokens * prior / prior.sum()
    return score.topk(size).indices.sort().values


def coverage(draft_tokens: Tensor, counts: Tensor) -> float:
    """Share of counted tokens that the draft can propose: an upper bound on acceptance."""
    return float(counts[draft_tokens].sum() / counts.sum())
