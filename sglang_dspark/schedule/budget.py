"""Chooses draft depth g and verify budget B: argmax of theta = tau / step_time (arXiv 2607.05147, Algorithm 1)."""

from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from sglang_dspark.schedule.stairs import Doubles, Ints, Stairs, StepTime, stairs
from sglang_dspark.schedule.survival import Floats, survival

Mode = Literal["scheduled", "verify_all", "no_draft"]

# A predicted gain below one percent is within the error of a profiled step time, so the simpler mode is taken.
MIN_GAIN = 0.01


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


def plan_simple(confidence: Floats, step_time: StepTime, *, max_depth: int) -> tuple[Plan, Plan]:
    """No draft, and verify-all at its best depth from 1 on. Arguments as plan_joint."""
    requests = len(confidence)
    depths = np.arange(max_depth + 1)
    expected = np.add.reduce(survival(confidence[:, :max_depth]), 0, np.float64).cumsum()
    tau = np.append(0.0, expected) + requests
    theta = tau / step_time(depths[:, None], requests * (1 + depths)).diagonal()
    best = 1 + int(theta[1:].argmax())
    none, everything = (_plan(g * requests, g, requests, tau.item(g), theta.item(g)) for g in (0, best))
    return none, everything


def plan_causal(confidence: Floats, step_time: StepTime, *, depth: int, prefill_tokens: int = 0) -> Plan:
    """Algorithm 1 with its causal early stop: admits survivals in order while theta rises, up to its first fall.

    For sampled drafts when only the current step's confidence is at hand. Whether a token is admitted then depends on
    no value that its own sample or a later one decides; a global argmax would break that (Appendix A), and so would
    comparing with verify-all or jumping to the end of a stair: no min_gain here, and every count is visited.
    """
    columns = survival(confidence[:, :depth]).T
    requests, first = len(confidence), prefill_tokens + len(confidence)
    budgets = np.arange(columns.size + 1)
    tau = np.append(requests, _tau(columns, budgets[:-1]))
    theta = tau / step_time(depth, budgets + first)
    stops = np.flatnonzero(theta[1:] <= theta[:-1])
    at = int(stops[0]) if len(stops) else columns.size
    return _plan(at, depth, requests, tau.item(at), theta.item(at))


def budget_from_survival(
    survivals: Floats, step_time: StepTime, min_gain: float = MIN_GAIN, prefill_tokens: int = 0
) -> Plan:
    """plan_budget for survivals [R, depth] already multiplied."""
    columns = survivals.T
    depth, requests = columns.shape
    steps = stairs(step_time, prefill_tokens, requests, depth)
    seconds = step_time(depth, steps.tokens)
    tau = _tau(columns, steps.starts[depth])
    theta = tau / seconds[1:]
    none, everything = requests / seconds.item(0), theta.item(-1)
    at, floor = (-1, everything) if everything > none * (1 + min_gain) else (None, none)
    top = int(theta.argmax())
    if theta[top] > floor * (1 + min_gain):
        at = top
    if at is None:
        return _plan(0, depth, requests, float(requests), none)
    return _plan(steps.budgets[at if at < 0 else at + 1], depth, requests, tau.item(at), theta.item(at))


def joint_from_survival(
    survivals: Floats, step_time: StepTime, min_gain: float = MIN_GAIN, prefill_tokens: int = 0
) -> Plan:
    """plan_joint for survivals [R, max depth] already multiplied."""
    columns = survivals.T
    max_depth, requests = columns.shape
    steps = stairs(step_time, prefill_tokens, requests, max_depth)
    seconds = step_time(steps.depths, steps.tokens)

    # What each depth gives when all of its tokens are verified, depth 0 being no draft; in lists, which are faster than
    # arrays for so few numbers.
    expected = list(accumulate(np.add.reduce(columns, 1, np.float64).tolist(), initial=float(requests)))
    simple = [tau / time for tau, time in zip(expected, seconds.take(steps.whole).tolist(), strict=True)]
    highest = max(simple)
    plain = 0 if highest <= simple[0] * (1 + min_gain) else simple.index(highest)
    best = plain * requests, plain, requests, expected[plain], simple[plain]
    ceiling = simple[plain] * (1 + min_gain)

    # Then depths are sorted, a likely one first, until bounds tell that none of the others can win: the optimum is
    # exact, and seldom is more than one depth sorted (1.3 of up to 8 over 300 random batches and costs of GPU shape).
    curve, fixed = seconds[0], seconds[:, 0].tolist()
    depth, left = simple.index(max(simple[1:]), 1), list(range(1, max_depth + 1))
    while True:
        tau = _tau(columns[:depth], steps.starts[depth])
        theta = tau / seconds[depth, 1 : len(tau) + 1]
        at = int(theta.argmax())
        if theta[at] > ceiling:
            ceiling = theta.item(at)
            best = min(steps.budgets[at + 1], depth * requests), depth, requests, tau.item(at), ceiling
        room = _room(columns, ceiling, at + 1, steps, curve, fixed)
        left = [other for other in left if other != depth and room[other] > 0]
        if not left:
            return _plan(*best)
        depth = max(left, key=room.__getitem__)


def _tau(columns: Floats, starts: Ints) -> Doubles:
    """Expected tokens after each stair, the last of which is all of columns [depth, R].

    starts: where in the ascending survivals the stairs begin, the last one first.
    """
    ordered = columns.flatten()
    ordered.sort()
    gains = ordered.astype(np.float64)
    if len(starts) < len(gains):
        gains = np.add.reduceat(gains, starts)
    gains[-1] += columns.shape[1]
    return np.add.accumulate(gains[::-1])


def _room(columns: Floats, rate: float, at: int, steps: Stairs, curve: Doubles, fixed: list[float]) -> list[float]:
    """Upper bound, for each depth, on the seconds by which it beats `rate`: where there are none, no theta exceeds it.

    For any value, B survivals are at most B * value and what all of them exceed it by. That is close to tau for the
    B-th largest survival, and at an optimum on stair `at` this one is worth what a token costs there.
    """
    requests, budgets = columns.shape[1], steps.budgets
    low, high = at - 1, min(at + 1, len(budgets) - 1)
    slope = (curve.item(high) - curve.item(low)) / (budgets[high] - budgets[low])
    value = np.float32(rate * slope)
    worth = float(value)
    gain = steps.drafts * (worth / rate)
    gain -= curve
    most = np.maximum.accumulate(gain).take(steps.full).tolist()
    room, above = [0.0], float(requests)
    for depth, row in enumerate(np.add.reduce(np.maximum(columns, value), 1).tolist(), 1):
        # A hundred-thousandth for rounding: float32 sums in pairs, which loses far less.
        above += row * (1 + 1e-5) - requests * worth
        room.append(above / rate + most[depth] - fixed[depth] + fixed[0])
    return room


def _plan(budget: int, depth: int, requests: int, tau: float, theta: float) -> Plan:
    mode: Mode = "no_draft" if budget == 0 else "verify_all" if budget == requests * depth else "scheduled"
    return Plan(depth, budget, mode, tau, tau / theta, theta)
