"""Chooses draft depth g and verify budget B: argmax of theta = tau / step_time (arXiv 2607.05147, Algorithm 1)."""

from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.survival import Floats, survival

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
Mode = Literal["scheduled", "verify_all", "no_draft"]

# A predicted gain below one percent is within the error of a profiled step time, so the simpler mode is taken.
MIN_GAIN = 0.01


class StepTime(Protocol):
    """Seconds of a step that drafts `depth` positions, for each count of tokens sent to the target.

    depth is an int, or an integer array [depths, 1] to be broadcast against tokens [n]. A StepTime that is constant
    between known counts, as with CUDA graph tiers, may also have edges(first, last) -> Ints: the counts in
    [first, last), ascending, at which a stair ends, or None where cost changes at every count.
    """

    def __call__(self, depth: Any, tokens: Ints, /) -> Doubles: ...


class Plan(NamedTuple):
    """What a step drafts and verifies, and what that was predicted to give."""

    depth: int  # draft positions per request
    budget: int  # draft tokens to verify, all requests together
    mode: Mode
    tau: float  # expected tokens produced, one per request without any draft
    step_time: float  # predicted seconds
    theta: float  # tau / step_time, tokens per second


def plan_joint(
    confidence: Floats,
    step_time: StepTime,
    *,
    max_depth: int,
    min_gain: float = MIN_GAIN,
    prefill_tokens: int = 0,
) -> Plan:
    """Global argmax of theta over depth 0..max_depth and every budget on the sorted survivals.

    confidence: [R, >= max_depth] float32, R >= 1, from earlier steps. step_time gets counts R + B + prefill_tokens
    (leave prefill_tokens 0 where the callable adds them itself, as BoundCost does). A search, not an early stop: cost
    is a staircase, and theta on it has many peaks. The simpler mode wins ties: verify-all (at its best depth) must gain
    more than min_gain over no draft, and a budget in between more than min_gain over whichever of the two is taken.
    """
    columns = survival(confidence[:, :max_depth]).T
    requests, first = len(confidence), prefill_tokens + len(confidence)
    budgets = _budgets(step_time, first, columns.size)
    seconds = step_time(np.arange(max_depth + 1)[:, None], budgets + first)

    # What each depth gives when all of its tokens are verified: depth 0 is no draft.
    everything = np.full(max_depth + 1, float(requests))
    everything[1:] += np.add.accumulate(np.add.reduce(columns, axis=1, dtype=np.float64))
    depths = np.arange(max_depth + 1)
    full = budgets.searchsorted(depths * requests)
    simple = everything / seconds[depths, full]
    plain = 1 + int(simple[1:].argmax())
    if simple[plain] <= simple[0] * (1 + min_gain):
        plain = 0

    # Depth g produces at most what the deepest does at equal budget, and at most everything it has. Depths are searched
    # from the highest bound on, and the search ends at the first bound that cannot win: the optimum stays exact.
    deepest = _tau(columns, budgets)
    bounds = (np.minimum(deepest, everything[:, None]) / seconds).max(axis=1)
    best = _plan(plain, min(int(budgets[full[plain]]), plain * requests), requests, everything[plain], simple[plain])
    ceiling = best.theta * (1 + min_gain)
    for depth in np.argsort(-bounds):
        if bounds[depth] <= ceiling:
            break
        tau = _tau(columns[:depth], budgets[: full[depth] + 1])
        theta = tau / seconds[depth, : len(tau)]
        at = int(theta.argmax())
        if theta[at] > ceiling:
            ceiling = float(theta[at])
            best = _plan(int(depth), min(int(budgets[at]), int(depth) * requests), requests, tau[at], theta[at])
    return best


def plan_budget(
    confidence: Floats,
    step_time: StepTime,
    *,
    depth: int,
    min_gain: float = MIN_GAIN,
    prefill_tokens: int = 0,
) -> Plan:
    """Global argmax of theta over the budget alone, for drafts of this depth (1 or more). Arguments as plan_joint."""
    columns = survival(confidence[:, :depth]).T
    requests, first = len(confidence), prefill_tokens + len(confidence)
    budgets = _budgets(step_time, first, columns.size)
    tau = _tau(columns, budgets)
    theta = tau / step_time(depth, budgets + first)
    at = int(theta.argmax())
    simple = 0 if theta[-1] <= theta[0] * (1 + min_gain) else len(theta) - 1
    if theta[at] <= theta[simple] * (1 + min_gain):
        at = simple
    return _plan(depth, int(budgets[at]), requests, tau[at], theta[at])


def plan_causal(confidence: Floats, step_time: StepTime, *, depth: int, prefill_tokens: int = 0) -> Plan:
    """Algorithm 1 with its causal early stop: admits survivals in order while theta rises, up to its first fall.

    For sampled drafts when only the current step's confidence is at hand. Whether a token is admitted then depends on
    no value that its own sample or a later one decides; a global argmax would break that (Appendix A), and so would
    comparing with verify-all or jumping to the end of a stair: no min_gain here, and every count is visited.
    """
    columns = survival(confidence[:, :depth]).T
    requests, first = len(confidence), prefill_tokens + len(confidence)
    budgets = np.arange(columns.size + 1)
    tau = _tau(columns, budgets)
    theta = tau / step_time(depth, budgets + first)
    stops = np.flatnonzero(theta[1:] <= theta[:-1])
    at = int(stops[0]) if len(stops) else columns.size
    return _plan(depth, at, requests, tau[at], theta[at])


def _budgets(step_time: StepTime, first: int, size: int) -> Ints:
    """The budgets that can be best, ascending from 0 to `size`: of a stair only its last, further tokens being free."""
    find = getattr(step_time, "edges", None)
    edges = None if find is None else find(first + 1, first + size)
    if edges is None:
        return np.arange(size + 1)
    budgets = np.empty(len(edges) + 2, np.int64)
    budgets[0], budgets[-1] = 0, size
    np.subtract(edges, first, budgets[1:-1])
    return budgets


def _tau(columns: Floats, budgets: Ints) -> Doubles:
    """Expected tokens produced at each budget, the last of which must be all of columns [depth, R] or more."""
    ordered = columns.flatten()
    ordered.sort()
    gains = ordered[::-1].astype(np.float64)
    if len(budgets) <= len(gains):
        gains = np.add.reduceat(gains, budgets[:-1])
    tau = np.empty(len(budgets))
    tau[0] = columns.shape[1]
    gains[0] += columns.shape[1]
    np.add.accumulate(gains, out=tau[1:])
    return tau


def _plan(depth: int, budget: int, requests: int, tau: float, theta: float) -> Plan:
    mode: Mode = "no_draft" if budget == 0 else "verify_all" if budget == requests * depth else "scheduled"
    return Plan(depth, budget, mode, float(tau), float(tau / theta), float(theta))
