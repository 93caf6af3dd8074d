"""Prometheus metrics of the scheduler, in the registry and under the labels of SGLang's own (`--enable-metrics`).

Sums, not ratios, wherever a ratio is of interest: a query divides them over any window. With `rate` over a window:

- accepted length: dspark:tokens_produced_total / dspark:request_steps_total
- error of tau: dspark:tau_predicted_total / dspark:tau_realised_total, and of the step time alike
- calibration error of position k: (dspark:confidence_predicted_total - dspark:confidence_accepted_total) /
  dspark:confidence_reached_total
- what a step spends on planning: dspark:planner_seconds_total / dspark:steps_total
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]

PREFIX = "dspark:"
COUNTERS = {
    "steps": "Decode steps.",
    "request_steps": "Decode steps, each counted once for every request that it gave tokens to.",
    "drafted": "Draft tokens proposed.",
    "verified": "Draft tokens that the target was sent.",
    "accepted": "Draft tokens accepted.",
    "target_tokens": "Tokens that the target forward was given.",
    "tokens_produced": "Tokens given to requests, bonus included.",
    "tau_predicted": "Tokens that the plans expected to be produced, of steps that had a plan.",
    "tau_realised": "Tokens produced in those steps.",
    "step_seconds_predicted": "Time that the plans expected of the steps that were timed.",
    "step_seconds_realised": "Time that those steps took.",
    "planner_seconds": "Host time spent planning.",
    "rest_steps": "Steps in which the draft model rested.",
}
GAUGES = {
    "depth": "Draft positions of the last step.",
    "budget": "Draft tokens that the last plan verifies, all requests together.",
}
# Counters with one more label: name to (label, help).
SPLIT = {
    "mode": ("mode", "Decode steps by what was planned."),
    "depth_steps": ("depth", "Decode steps by draft depth."),
    "accepted_length": ("length", "Request steps by accepted length, bonus included."),
    "confidence_reached": ("position", "Draft tokens verified with all before them accepted, by position."),
    "confidence_predicted": ("position", "Of those, how many the confidence expected to be accepted."),
    "confidence_accepted": ("position", "Of those, how many were accepted."),
    "guard_switches": ("switch", "Changes of mode by the guard, as MODE:REASON."),
    "faults": ("part", "Faults of the scheduler that were made up for."),
}


class StepMetrics:
    """Counters and gauges of one server process. A step costs tens of microseconds, however many requests it has."""

    def __init__(self, labels: Mapping[str, Any], gamma: int, registry: Any = None) -> None:
        """labels: SGLang's own of this process. registry: prometheus_client's default one if None."""
        from prometheus_client import REGISTRY, Counter, Gauge  # SGLang sets its multiprocess folder before this

        names, registry = list(labels), registry or REGISTRY
        self._counters = {
            name: Counter(PREFIX + name, text, names, registry=registry).labels(**labels)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(PREFIX + name, text, names, registry=registry, multiprocess_mode="mostrecent").labels(**labels)
            for name, text in GAUGES.items()
        }
        self._split = {
            name: Counter(PREFIX + name, text, [*names, label], registry=registry)
            for name, (label, text) in SPLIT.items()
        }
        self._labels, self._gamma = dict(labels), gamma
        self._children: dict[tuple[str, str], Any] = {}

    def planned(self, mode: str, depth: int, budget: int, resting: bool, seconds: float) -> None:
        """A step was planned, in so many seconds."""
        self._add("mode", mode, 1)
        self._add("depth_steps", str(depth), 1)
        self._gauges["depth"].set(depth)
        self._gauges["budget"].set(budget)
        self._counters["planner_seconds"].inc(seconds)
        if resting:
            self._counters["rest_steps"].inc()

    def settled(
        self,
        depth: int,
        verified: Ints,
        accepted: Ints,
        confidence: Floats,
        alive: NDArray[np.bool_],
        *,
        tokens: int,
        tau: float,
    ) -> None:
        """A step's outcome.

        verified, accepted: [R] draft tokens. confidence: [R, >= depth]. alive: [R] which requests were given them: one
        that had ended before is part of the work, and of no text. tokens: given to the target. tau: expected by the
        plan; NaN for none.
        """
        requests, all_accepted = len(accepted), int(accepted.sum())
        counts = {"steps": 1, "drafted": requests * depth, "verified": int(verified.sum()), "accepted": all_accepted}
        verified, accepted, confidence = verified[alive], accepted[alive], confidence[alive]
        given = {"request_steps": len(accepted), "tokens_produced": int(accepted.sum()) + len(accepted)}
        for name, value in {**counts, **given, "target_tokens": tokens}.items():
            self._counters[name].inc(value)
        if tau == tau:
            self._counters["tau_predicted"].inc(tau)
            self._counters["tau_realised"].inc(all_accepted + requests)
        for length, count in enumerate(np.bincount(accepted).tolist(), start=1):
            if count:
                self._add("accepted_length", str(length), count)
        reached = np.minimum(verified, accepted + 1)
        for position in range(min(int(reached.max(initial=0)), self._gamma)):
            seen = reached > position
            # A counter takes no negative amount, and would never lose an infinite one.
            expected = np.nan_to_num(confidence[seen, position].astype(np.float64)).clip(0.0, 1.0)
            self._add("confidence_reached", str(position + 1), int(seen.sum()))
            self._add("confidence_predicted", str(position + 1), float(expected.sum()))
            self._add("confidence_accepted", str(position + 1), int((accepted[seen] > position).sum()))

    def timed(self, predicted: float, realised: float) -> None:
        """A step whose time was predicted was measured, both in seconds."""
        self._counters["step_seconds_predicted"].inc(predicted)
        self._counters["step_seconds_realised"].inc(realised)

    def switched(self, mode: str, reason: str) -> None:
        """The guard changed the mode; reason: tau, time or plan."""
        self._add("guard_switches", f"{mode}:{reason}", 1)

    def fault(self, part: str) -> None:
        """A fault of this part was made up for."""
        self._add("faults", part, 1)

    def _add(self, name: str, value: str, amount: float) -> None:
        child = self._children.get((name, value))
        if child is None:
            child = self._split[name].labels(**self._labels, **{SPLIT[name][0]: value})
            self._children[name, value] = child
        child.inc(amount)
