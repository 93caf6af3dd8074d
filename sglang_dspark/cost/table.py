"""The step cost table: what profiling found, as plain numbers that can be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from reprlib import repr as short  # of a file's lists and numbers, which may be long

LARGEST = 2**31 - 1  # tokens and seconds: far beyond any step, and what is computed with them fits into 64 bits


@dataclass(frozen=True)
class CostTable:
    """Seconds of a decode step as terms that add up: fixed + draft(R, g) + verify(tier(tokens), R) + attention * kv.

    Every forward costs a fixed part and a part per request; the target's also a part per token and per context token.
    """

    tokens: tuple[int, ...]  # token counts of the target forward that were measured, ascending
    seconds: tuple[float, ...]  # its time at each, without per-request and context parts; non-decreasing
    per_request: float = 0.0  # target forward, seconds per request
    per_kv_token: float = 0.0  # target forward, seconds per token of context, all requests together
    draft_start: float = 0.0  # paid once by a step that drafts at all
    draft_fixed: float = 0.0  # one draft forward
    draft_per_request: float = 0.0  # one draft forward, per request
    extend_fixed: float = 0.0  # the draft extend after each verify
    extend_per_request: float = 0.0
    extend_per_token: float = 0.0  # per token of its R * (depth + 1) rows
    free_depth: int = 1  # depths that need no draft forward: an EAGLE chain's first position comes from the extend
    # Token counts at which a stair ends, those of graphs where there are some: a count costs what the tier above it
    # costs. None: costs between two measured counts are interpolated.
    tiers: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None  # counts that are padded to the tier above without a graph; None: none is

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.seconds):
            raise ValueError(
                "A cost table needs one time for each token count, "
                f"got {len(self.tokens)} counts and {len(self.seconds)} times."
            )
        for name, counts in (("token counts", self.tokens), ("tiers", self.tiers), ("padded counts", self.padded)):
            if counts is not None and not _rise(counts):
                raise ValueError(
                    f"The {name} of a cost table must be whole numbers that rise from 1 or more to {LARGEST} or less, "
                    f"got {short(counts)}."
                )
        if self.tiers is not None and not self.tiers:
            raise ValueError("The tiers of a cost table must be None or one and more, got none.")
        # Comparisons, and not isfinite, which overflows on a whole number that no float holds.
        if not all(0 < s <= LARGEST for s in self.seconds) or any(a > b for a, b in pairwise(self.seconds)):
            raise ValueError(
                f"The times of a cost table must be positive, {LARGEST} seconds or less, and never fall, "
                f"got {short(self.seconds)}."
            )
        for name in TERMS:
            if not 0 <= getattr(self, name) <= LARGEST:
                raise ValueError(
                    f"{name} of a cost table must be from 0 to {LARGEST} seconds, got {short(getattr(self, name))}."
                )
        if not (isinstance(self.free_depth, Integral) and 0 <= self.free_depth <= LARGEST):
            raise ValueError(
                f"free_depth of a cost table must be a whole number from 0 to {LARGEST}, got {short(self.free_depth)}."
            )

    def with_draft_terms_of(self, other: CostTable) -> CostTable:
        """This target's costs, and of `other` those of the draft model's forwards and its tiers."""
        draft = {name: getattr(other, name) for name in TERMS if name.startswith(("draft_", "extend_"))}
        return replace(self, tiers=other.tiers, padded=other.padded, free_depth=other.free_depth, **draft)

    def summary(self) -> dict[str, object]:
        """The terms in milliseconds, rounded, as plain JSON types: what a person reads."""
        return {
            "tokens": list(self.tokens),
            "ms": [round(1e3 * s, 3) for s in self.seconds],
            "ms_per_request": round(1e3 * self.per_request, 4),
            "ms_per_1k_context": round(1e6 * self.per_kv_token, 4),
            "draft_ms": [round(1e3 * x, 4) for x in (self.draft_start, self.draft_fixed, self.draft_per_request)],
            "extend_ms": [
                round(1e3 * x, 4) for x in (self.extend_fixed, self.extend_per_request, self.extend_per_token)
            ],
        }


def _rise(counts: Sequence[int]) -> bool:
    """Whether these are numbers of tokens that a step can have, ascending."""
    whole = all(isinstance(count, Integral) for count in counts)
    return whole and all(a < b for a, b in pairwise((0, *counts, LARGEST + 1)))


# The terms that are one number each.
TERMS = (
    "per_request",
    "per_kv_token",
    "draft_start",
    "draft_fixed",
    "draft_per_request",
    "extend_fixed",
    "extend_per_request",
    "extend_per_token",
)
