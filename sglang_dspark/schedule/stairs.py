"""The budgets that can be best: where step time is constant up to a tier, only those that fill one."""

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]


class StepTime(Protocol):
    """Seconds of a step that drafts `depth` positions, for each count of tokens sent to the target.

    depth is an int, or an integer array [depths, 1] to be broadcast against tokens [n]. The seconds of a depth and
    those of its tokens add up: bounds on what a depth can give count on it. A StepTime that is constant between known
    counts, as with CUDA graph tiers, may also have edges(first, last) -> Ints: the counts in [first, last), ascending,
    at which a stair ends, or None where cost changes at every count.
    """

    def __call__(self, depth: Any, tokens: Ints, /) -> Doubles: ...


class Stairs(NamedTuple):
    """Candidate budgets for R requests drafted up to `depth` deep. Read only: batches of a size share them."""

    tokens: Ints  # [n] ascending: nothing but anchors, then what fills each stair, the last all R * depth drafts
    budgets: list[int]  # [n] the drafts among them
    drafts: Doubles  # the same, to multiply
    full: Ints  # [depth + 1] the first entry that holds all of a draft so deep
    starts: list[Ints]  # [depth + 1] for each depth where its stairs begin in its ascending survivals, last stair first
    depths: Ints  # [depth + 1, 1]
    whole: Ints  # [depth + 1] index of each depth at its full entry in an array [depth + 1, n]


def stairs(step_time: StepTime, prefill_tokens: int, requests: int, depth: int) -> Stairs:
    """The stairs of a step of `requests` decode rows and `prefill_tokens` beside them."""
    first = prefill_tokens + requests
    find = getattr(step_time, "edges", None)
    edges = None if find is None else find(first + 1, first + requests * depth)
    return _stairs(None if edges is None else edges.tobytes(), first, requests, depth)


# Tiers stay and batch sizes change slowly, so this is found more often than made. Without tiers one entry may hold
# 5 MB, at 4096 requests of 16 drafts.
@lru_cache(maxsize=8)
def _stairs(edges: bytes | None, first: int, requests: int, depth: int) -> Stairs:
    last = first + requests * depth
    inner = np.arange(first + 1, last) if edges is None else np.frombuffer(edges, np.int64)
    tokens = np.concatenate([[first], inner, [last]])
    budgets = tokens - first
    depths = np.arange(depth + 1)
    full = budgets.searchsorted(depths * requests)
    starts = [np.maximum(d * requests - budgets[1 : f + 1][::-1], 0) for d, f in zip(depths, full, strict=True)]
    whole = depths * len(tokens) + full
    return Stairs(tokens, budgets.tolist(), budgets.astype(np.float64), full, starts, depths[:, None], whole)
