"""Inputs for the allocation tests: random batches and every class of input that could break a top-B."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    name: str
    confidence: Tensor
    remap: Tensor
    prior: Tensor
    budget: Tensor
    depth: int


def random_case(generator: torch.Generator, most_requests: int = 24, most_gamma: int = 8) -> Case:
    """Few distinct values and dirty ones often, so that ties and sanitising matter; some requests have no row."""

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    requests, gamma, rows = integer(1, most_requests), integer(1, most_gamma), integer(1, most_requests)
    confidence = torch.rand(rows, gamma, generator=generator)
    kind = integer(0, 3)
    if kind == 1:
        confidence = (confidence * 4).round() / 4
    elif kind == 2:
        for value in (float("nan"), -1.0, 2.0, float("inf"), -0.0, 1e-42):
            confidence[torch.rand(rows, gamma, generator=generator) < 0.08] = value
    elif kind == 3:
        confidence = 1 - confidence**4 * 1e-6  # neighbours in float32
    remap = torch.randint(-1, rows, (requests,), generator=generator)
    budget = torch.tensor(integer(-1, requests * gamma + 3), dtype=torch.int32)
    return Case("random", confidence, remap, torch.rand(gamma, generator=generator), budget, integer(0, gamma))


def adversarial_cases(requests: int, gamma: int) -> Iterator[Case]:
    """All equal, all zero, all one, NaN rows, denormals, every budget from below 0 to beyond what exists."""
    generator = torch.Generator().manual_seed(requests * 31 + gamma)
    nan_rows = torch.rand(requests, gamma, generator=generator)
    nan_rows[::3] = float("nan")
    late_nan = torch.full((requests, gamma), 0.9)
    late_nan[1::2, gamma // 2 :] = float("nan")
    batches = {
        "all equal": torch.full((requests, gamma), 0.7),
        "all zero": torch.zeros(requests, gamma),
        "all one": torch.ones(requests, gamma),
        "nan rows": nan_rows,
        "nan from the middle": late_nan,
        "denormals": torch.full((requests, gamma), 1.0).index_fill_(1, torch.tensor([0]), 1e-44),
        "underflow": torch.full((requests, gamma), 1e-20),
        "above one": torch.full((requests, gamma), 3.0),
        "infinite": torch.full((requests, gamma), float("inf")),
        "negative": torch.full((requests, gamma), -0.5),
        "random": torch.rand(requests, gamma, generator=generator),
    }
    remap = torch.arange(requests)
    remap[::5] = -1
    size = requests * gamma
    for name, confidence in batches.items():
        for budget in sorted({-1, 0, 1, gamma, size // 3, size - 1, size, size + 7}):
            yield Case(
                f"{name}, B={budget}",
                confidence,
                remap,
                torch.linspace(0.9, 0.1, gamma),
                torch.tensor(budget, dtype=torch.int32),
                gamma,
            )
