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
# At the optimum a survival is worth theta times a token's cost, and theta is known to about ten percent before any
# search: it is at least that of no draft and verify-all. Bounds at both ends of that range left 0.9 depths to sort, of
# 7, on 54 cost tables of GPU shape; at the lower end alone 1.9.
_GUESSES = np.array([1.0, 1.1])


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
    return joint_from_survival(survival(confidence[:, :max_depth]), step_time, min_gain, prefill_tokens)


def plan_budget(
    confidence: Floats,
    step_time: StepTime,
    *,
    depth: int,
    min_gain: float = MIN_GAIN,
    prefill_tokens: int = 0,
) -> Plan:
    """Global argmax of theta over the budget alone, for drafts of this depth (1 or more). Arguments as plan_joint."""
    return budget_from_survival(survival(confidence[:, :depth]), step_time, min_gain, prefill_tokens)


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


def joint_from_survival(
    survivals: Floats, step_time: StepTime, min_gain: float = MIN_GAIN, prefill_tokens: int = 0
) -> Plan:
    """plan_joint for survivals [R, max depth] already multiplied."""
    columns = survivals.T
    max_depth, requests = columns.shape
    first = prefill_tokens + requests
    budgets = _budgets(step_time, first, columns.size)
    depths = np.arange(max_depth + 1)
    seconds = step_time(depths[:, None], budgets + first)

    # What each depth gives when all of its tokens are verified: depth 0 is no draft.
    everything = np.empty(max_depth + 1)
    everything[0] = requests
    everything[1:] = np.add.reduce(columns, 1, np.float64)
    np.add.accumulate(everything, 0, None, everything)
    full = budgets.searchsorted(depths * requests)
    simple = (everything / seconds[depths, full]).tolist()
    plain = simple.index(max(simple[1:]), 1)
    if simple[plain] <= simple[0] * (1 + min_gain):
        plain = 0
    best = (plain, full[plain], everything[plain], simple[plain])
    ceiling = simple[plain] * (1 + min_gain)

    # Depths are searched in the order of a bound on what they can give, until none can win: the optimum is exact, and
    # seldom is more than one depth sorted.
    slope = (seconds[-1, -1] - seconds[-1, 0]) / columns.size
    most = _at_most(columns, max(simple) * slope * _GUESSES, budgets)
    bounds = np.maximum.reduce(np.minimum(most, everything[:, None]) / seconds, 1)
    bounds[0] = 0.0  # depth 0 has one budget, and is in `simple`
    while bounds[depth := int(bounds.argmax())] > ceiling:
        tau = _tau(columns[:depth], budgets[: full[depth] + 1])
        theta = tau / seconds[depth, : len(tau)]
        at = int(theta.argmax())
        if theta[at] > ceiling:
            ceiling = theta[at]
            best = (depth, at, tau[at], ceiling)
        bounds[depth] = 0.0
    depth, at, expected, rate = best
    return _plan(depth, min(int(budgets[at]), depth * requests), requests, expected, rate)


def budget_from_survival(
    survivals: Floats, step_time: StepTime, min_gain: float = MIN_GAIN, prefill_tokens: int = 0
) -> Plan:
    """plan_budget for survivals [R, depth] already multiplied."""
    columns = survivals.T
    depth, requests = columns.shape
    first = prefill_tokens + requests
    budgets = _budgets(step_time, first, columns.size)
    tau = _tau(columns, budgets)
    theta = tau / step_time(depth, budgets + first)
    at = int(theta.argmax())
    simple = 0 if theta[-1] <= theta[0] * (1 + min_gain) else len(theta) - 1
    if theta[at] <= theta[simple] * (1 + min_gain):
        at = simple
    return _plan(depth, int(budgets[at]), requests, tau[at], theta[at])


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
    tau = np.empty(len(budgets))
    tau[0] = columns.shape[1]
    tau[1:] = np.add.reduceat(gains, budgets[:-1]) if len(budgets) <= len(gains) else gains
    return np.add.accumulate(tau, 0, None, tau)


def _at_most(columns: Floats, values: Doubles, budgets: Ints) -> Doubles:
    """Upper bound on tau [depth + 1, n] of every depth and budget B, close where one of the two values is survival B.

    B survivals are at most B * value and what all survivals together exceed the value by, whatever the value.
    """
    depth, requests = columns.shape
    over = columns - values.astype(np.float32)[:, None, None]
    np.maximum(over, 0, out=over)
    excess = np.empty((2, depth + 1))
    excess[:, 0] = requests
    # A hundred-thousandth for rounding: float32 sums in pairs, which loses far less.
    excess[:, 1:] = np.add.reduce(over, 2) * (1 + 1e-5)
    np.add.accumulate(excess, 1, None, excess)
    low, high = excess[:, :, None] + (values[:, None] * budgets)[:, None]
    return np.minimum(low, high)


def _plan(depth: int, budget: int, requests: int, tau: float, theta: float) -> Plan:
    mode: Mode = "no_draft" if budget == 0 else "verify_all" if budget == requests * depth else "scheduled"
    return Plan(depth, budget, mode, float(tau), float(tau / theta), float(theta))
