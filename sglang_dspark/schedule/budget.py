"""Chooses draft depth g and verify budget B of a step: the argmax of theta = tau / step_time (arXiv 2607.05147, Algorithm 1)."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.survival import Floats, survival

Mode = Literal["scheduled", "verify_all", "no_draft"]
StepTime = Callable[[int, NDArray[np.int64]], NDArray[np.float64]]

# A predicted gain below this is within the error of a profiled step time, so the simpler mode is taken.
MIN_GAIN = 0.01


class Plan(NamedTuple):
    """What a step drafts and verifies, and what that was predicted to give."""

    depth: int  # draft positions per request to draft
    budget: int  # draft tokens to verify, all requests together
    mode: Mode
    tau: float  # expected tokens produced, anchors' successors included
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

    confidence: [R, >= max_depth] float32, from earlier steps. step_time(depth, tokens): seconds for each token count, where
    tokens = prefill_tokens + R + B. A search, not an early stop: cost is a staircase and theta is not unimodal on it.
    Verify-all (at its best depth) or no draft is taken instead where the best budget gains less than min_gain over it.
    """
    plans = [_search(confidence, step_time, depth, prefill_tokens) for depth in range(max_depth + 1)]
    best = max((plan[0] for plan in plans), key=lambda plan: plan.theta)
    simple = max([plans[0][0], *(plan[1] for plan in plans[1:])], key=lambda plan: plan.theta)
    return simple if best.theta <= simple.theta * (1 + min_gain) else best


def plan_budget(
    confidence: Floats, step_time: StepTime, *, depth: int, min_gain: float = MIN_GAIN, prefill_tokens: int = 0
) -> Plan:
    """Global argmax of theta over the budget alone, for a draft already made at this depth. Arguments as plan_joint."""
    best, full = _search(confidence, step_time, depth, prefill_tokens)
    return full if best.theta <= full.theta * (1 + min_gain) else best


def plan_causal(confidence: Floats, step_time: StepTime, *, depth: int, prefill_tokens: int = 0) -> Plan:
    """Algorithm 1 with its causal early stop: admits survivals in order while theta rises, and stops at the first fall.

    For sampled drafts when only the current step's confidence is at hand: whether a token is admitted then depends on
    nothing that its own sampled value or a later one decides, which a global argmax would break (Appendix A).
    """
    tau, seconds = _curves(confidence, step_time, depth, prefill_tokens)
    theta = tau / seconds
    falls = np.flatnonzero(theta[1:] <= theta[:-1])
    return _plan(depth, int(falls[0]) if falls.size else theta.size - 1, len(confidence), tau, seconds)


def _curves(
    confidence: Floats, step_time: StepTime, depth: int, prefill_tokens: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """tau and step time at every budget 0..R*depth."""
    ordered = -np.sort(-survival(confidence[:, :depth]), axis=None)
    tau = len(confidence) + np.concatenate([[0.0], np.cumsum(ordered, dtype=np.float64)])
    tokens = np.arange(tau.size, dtype=np.int64) + (prefill_tokens + len(confidence))
    return tau, step_time(depth, tokens)


def _plan(
    depth: int, budget: int, requests: int, tau: NDArray[np.float64], seconds: NDArray[np.float64]
) -> Plan:
    mode: Mode = "scheduled"
    if budget == 0:
        mode = "no_draft"
    elif budget == requests * depth:
        mode = "verify_all"
    expected, cost = float(tau[budget]), float(seconds[budget])
    return Plan(depth, budget, mode, expected, cost, expected / cost)


def _search(confidence: Floats, step_time: StepTime, depth: int, prefill_tokens: int) -> tuple[Plan, Plan]:
    """The best budget at a depth, and verify-all at it."""
    tau, seconds = _curves(confidence, step_time, depth, prefill_tokens)
    requests = len(confidence)
    best = int(np.argmax(tau / seconds))
    return _plan(depth, best, requests, tau, seconds), _plan(depth, tau.size - 1, requests, tau, seconds)
