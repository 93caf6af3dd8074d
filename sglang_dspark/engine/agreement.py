"""Tensor-parallel ranks must have been started alike: one that drafts another depth would leave the others waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dspark.config import Refusal


def refuse_differences(settings: Sequence[Mapping[str, Any]]) -> None:
    """Compare what every rank was started with, by rank.

    Raises:
        Refusal: on every rank, naming the first setting that differs and where.
    """
    first = settings[0]
    for rank, other in enumerate(settings):
        for name in sorted({*first, *other}):
            if other.get(name) != first.get(name):
                raise Refusal(
                    f"Tensor-parallel rank {rank} was started with {name} {other.get(name)!r} and rank 0 with "
                    f"{first.get(name)!r}; start all ranks with the same flags, DSPARK_* variables and files."
                )
