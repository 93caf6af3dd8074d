"""Batches of answers as the draft sees them: pairs of a hidden state and the next token, and what they predict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.train.model import Pairs
from sglang_dspark.train.store import Sample


@dataclass(frozen=True)
class Batch:
    """Pairs, every chain that can be started in them, and the target's view of what the chains draft.

    row, start int64 [chains], row by row in rising columns; answer bool [chains]: whether the chain drafts answer
    tokens, as in serving, or is started inside the prompt. The pair (hidden state i, token i + 1) at a column predicts
    token i + 2: text int64 [rows, columns] is that token (-1 where there is none to score). Of the pairs with such a
    token, row by row, final float32 [scored, hidden] is the target's last hidden state at token i + 1, whose head gives
    its distribution; at int64 [chains] says which of them is the chain's own start, the next columns' following it.
    """

    pairs: Pairs
    row: Tensor
    start: Tensor
    answer: Tensor
    text: Tensor
    final: Tensor
    at: Tensor


def is_usable(sample: Sample) -> bool:
    """Whether at least one draft of the answer can be scored: it has two tokens or more."""
    return sample.tokens.numel() >= sample.prompt_tokens + 2


def collate(samples: list[Sample], prompt_share: float = 1.0, seed: int = 0) -> Batch:
    """Samples side by side; every one usable.

    Answer tokens are P .. T - 1 (P the prompt's size). Pair i holds hidden state i and token i + 1. In serving chains
    start from i = P - 1 on, the first pair after prefill, which predicts token P + 1; the last is T - 3, which predicts
    token T - 1. For training they also start inside the prompt, from `sample.first` on: a seeded choice of
    `prompt_share` of those.
    """
    sizes = [sample.tokens.numel() - 2 for sample in samples]
    begins = [sample.prompt_tokens - 1 if prompt_share == 0 else sample.first for sample in samples]
    rows, columns, width = len(samples), max(sizes), samples[0].aux.shape[1]
    aux = torch.zeros(rows, columns, width)
    tokens = torch.zeros(rows, columns, dtype=torch.long)
    real = torch.zeros(rows, columns, dtype=torch.bool)
    text = torch.full((rows, columns), -1)
    final = []
    for row, (sample, size, begin) in enumerate(zip(samples, sizes, begins, strict=True)):
        aux[row, :size] = sample.aux[:size].float()
        tokens[row, :size] = sample.tokens[1:-1].long()
        real[row, :size] = True
        text[row, begin:size] = sample.tokens[begin + 2 :].long()
        final.append(sample.final[begin - sample.first :].float())
    row_of, start = (text >= 0).nonzero(as_tuple=True)
    in_answer = start >= torch.tensor([sample.prompt_tokens - 1 for sample in samples])[row_of]
    drawn = torch.rand(row_of.numel(), generator=torch.Generator().manual_seed(seed))
    (at,) = (in_answer | (drawn < prompt_share)).nonzero(as_tuple=True)
    return Batch(Pairs(aux, tokens, real), row_of[at], start[at], in_answer[at], text, torch.cat(final), at)


def epoch(samples: list[Sample], answers: int, seed: int) -> Iterator[list[Sample]]:
    """All samples once, `answers` at a time, in a seeded order; those of a batch have similar prompt lengths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([float(sample.prompt_tokens) for sample in samples])
    # Neighbours differ from epoch to epoch: lengths are blurred by 10 % before they are sorted.
    order = (sizes * (1 + 0.1 * torch.rand(len(samples), generator=generator))).argsort()
    chunks = order.split(answers)
    for chunk in torch.randperm(len(chunks), generator=generator).tolist():
        yield [samples[i] for i in chunks[chunk].tolist()]
