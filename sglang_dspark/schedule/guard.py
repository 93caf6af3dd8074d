"""Falls back to verify-all or to no draft where that is measured to be faster than what the plans promise.

The planner goes by predictions: of the tokens a step gives (tau) and of the time it takes. The guard compares both
with what came true, apart for each mode, and corrects a mode's predicted throughput by them. A mode that has not run
lately is tried for a few steps before it is believed, the less often the less it promised the last times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import NamedTuple

from sglang_dspark.schedule.budget import Mode, Plan

# Another mode is compared with the present one every so many steps: the comparison costs as much as half a plan.
EVERY = 8
# Steps of a trial, and how many steps old a mode's last one may be for its measurements to count.
TRIAL, FRESH = 8, 256
# The least lead that a switch is worth, above what may be chance at two standard errors.
LEAD, ERRORS = 0.02, 2.0
# Steps between two trials of a mode, at first and at most: each trial in vain doubles them. A mode whose corrected
# prediction lies below PROMISING of the present one is tried eight times less often, and not never: predictions may be
# what is wrong. At half the speed, TRIAL steps in LONGEST cost below half a percent.
SHORTEST, LONGEST, PROMISING = 64, 1024, 0.8
# Memory of tau and time, steps. An error counts as at most fourfold, which is also as far as the cost model corrects
# itself: a stall is no property of a mode.
MEMORY, CLAMP = 256, log(4.0)
# A batch that grew or shrank by half is another load, and the other modes are worth asking again.
OTHER_LOAD = log(1.5)


class Switch(NamedTuple):
    """A change of mode."""

    mode: Mode
    reason: str
    """tau, time or plan: what the lead comes from, tokens or time that were mispredicted, or predictions themselves."""
    lead: float
    """By what factor the new mode is expected to be faster."""


class _Mean:
    """Mean of log ratios with a bounded memory; forgets all after a pause of FRESH steps."""

    def __init__(self) -> None:
        self.value, self._square, self._count, self._last = 0.0, 0.0, 0, 0

    def restart(self) -> None:
        self._count = 0

    def add(self, ratio: float, step: int) -> None:
        if step - self._last > FRESH:
            self._count = 0
        self._count, self._last = min(self._count + 1, MEMORY), step
        error = max(-CLAMP, min(CLAMP, log(ratio))) - self.value
        self.value += error / self._count
        self._square += (error * error * (self._count > 1) - self._square) / self._count

    @property
    def variance(self) -> float:
        """Of the mean."""
        return self._square / self._count if self._count else 0.0

    @property
    def known(self) -> bool:
        return self._count >= TRIAL // 2

    def fresh(self, step: int) -> bool:
        return self.known and step - self._last <= FRESH


@dataclass
class _Record:
    """What is known of a mode."""

    time: _Mean = field(default_factory=_Mean)
    """Realised over predicted step time."""
    weight: float = 0.0
    produced: float = 0.0
    expected: float = 0.0
    square: float = 0.0
    """Steps, tokens realised and predicted in them, and the squares of the differences; each step fades with MEMORY."""
    due: int = SHORTEST
    """Step of the next trial."""
    pause: int = SHORTEST
    """Steps between trials."""

    def add(self, produced: float, expected: float, keep: float = 1 - 1 / MEMORY) -> None:
        self.weight = self.weight * keep + 1
        self.produced = self.produced * keep + produced
        self.expected = self.expected * keep + expected
        self.square = self.square * keep + (produced - expected) ** 2

    def start_trial(self) -> None:
        """The trial's own times count, and its tokens for more than those before it."""
        self.time.restart()
        keep = min(1.0, TRIAL / self.weight) if self.weight else 1.0
        self.weight, self.produced = keep * self.weight, keep * self.produced
        self.expected, self.square = keep * self.expected, keep * self.square

    @property
    def tau(self) -> float:
        """Log of realised over predicted tokens; a few steps say little, so it starts from 0 with the weight of 4."""
        mean = 4 * self.expected / self.weight if self.weight else 1.0
        return max(-CLAMP, min(CLAMP, log((self.produced + mean) / (self.expected + mean))))

    @property
    def variance(self) -> float:
        """Of the log of a throughput corrected by this record."""
        return self.time.variance + (self.square / self.expected**2 if self.expected else 0.0)


class Guard:
    """The mode that steps run in: ``scheduled`` (what the plan says), ``verify_all`` or ``no_draft``.

    Memory: some numbers a mode.
    """

    def __init__(self) -> None:
        self.mode: Mode = "scheduled"
        self.switches: list[Switch] = []
        """Those not taken by :meth:`take_switches` yet, the oldest first."""
        self._records: dict[Mode, _Record] = {mode: _Record() for mode in ("scheduled", "verify_all", "no_draft")}
        self._step = 0
        self._trial: Mode | None = None
        self._trial_ends = 0
        self._lead: dict[Mode, float] = {}
        self._load = 0.0

    def choose(self, plan: Plan, requests: int, alternatives: Callable[[], tuple[Plan, Plan]]) -> Plan:
        """The plan to run: `plan` itself, or one of the alternatives (no draft, verify-all at its best depth)."""
        self._step += 1
        if self._trial is None and self.mode == "scheduled" and self._step % EVERY:
            return plan
        simple = alternatives()
        if self._trial is not None:
            self._judge_trial(plan, simple)
        elif self._step % EVERY == 0:
            self._compare(plan, requests, simple)
        wanted = self._trial or self.mode
        if wanted == "scheduled" and not plan.mode == self.mode == "no_draft":
            return plan
        none, everything = simple
        return none if wanted == "no_draft" else everything

    def observe(self, plan: Plan, produced: int, seconds: float) -> None:
        """A step's outcome: tokens it gave and the time it took (NaN: not known). Plans that predict nothing pass."""
        if not (plan.tau > 0 and plan.step_time > 0):
            return
        record = self._records[plan.mode]
        record.add(produced, plan.tau)
        if seconds > 0:
            record.time.add(seconds / plan.step_time, self._step)

    @property
    def trial(self) -> Mode | None:
        """The mode that is being tried for some steps; None: none is."""
        return self._trial

    def take_switches(self) -> list[Switch]:
        """The switches since the last call."""
        taken, self.switches = self.switches, []
        return taken

    def info(self) -> dict[str, object]:
        """Mode and what it is judged by, as plain JSON types."""
        return {
            "mode": self.mode,
            "trial": self._trial,
            "time_ratio": {mode: round(exp(it.time.value), 3) for mode, it in self._records.items()},
            "tau_ratio": {mode: round(exp(it.tau), 3) for mode, it in self._records.items()},
        }

    # -- inside ----------------------------------------------------------------------------------------------------

    def _corrected(self, plan: Plan) -> float:
        """Log of the plan's throughput, corrected by what its mode's predictions were worth."""
        record = self._records[plan.mode]
        # What no draft gives is no estimate; what a mode that did not draft lately would give is the others' estimate.
        known = record if record.weight else self._records["scheduled"]
        tau = 0.0 if plan.mode == "no_draft" else known.tau
        return log(plan.theta) + tau - record.time.value

    def _others(self, plan: Plan, simple: tuple[Plan, Plan]) -> tuple[Plan, dict[Mode, Plan]]:
        """The plan of the present mode, and those of the modes that would do something else."""
        by_mode: dict[Mode, Plan] = {"no_draft": simple[0], "verify_all": simple[1]}
        home = plan if self.mode == "scheduled" else by_mode[self.mode]
        others: dict[Mode, Plan] = {}
        if self.mode != "scheduled":
            # A planner that would do the same may be wrong: from drafts alone it learns otherwise.
            others["scheduled"] = simple[1] if plan.mode == self.mode == "no_draft" else plan
        others |= {mode: other for mode, other in by_mode.items() if other.mode != plan.mode}
        return home, {mode: other for mode, other in others.items() if other.mode != home.mode}

    def _compare(self, plan: Plan, requests: int, simple: tuple[Plan, Plan]) -> None:
        self._notice_another_load(requests)
        if self.mode == plan.mode == "verify_all":
            self._switch("scheduled", plan, plan, 0.0)  # the planner has come to the same, and looks further
            return
        home, others = self._others(plan, simple)
        if not self._records[home.mode].time.fresh(self._step):
            return  # nothing to compare with
        mine = self._corrected(home)
        for mode, other in others.items():
            lead = self._corrected(other) - mine
            self._lead[mode] = lead if mode not in self._lead else (self._lead[mode] + lead) / 2
            record = self._records[mode]
            promising = self.mode != "scheduled" or lead > log(PROMISING)
            if self._records[other.mode].time.fresh(self._step):
                if self._beats(home, other, min(lead, self._lead[mode])):
                    self._switch(mode, home, other, lead)
                    return
            elif self._step >= record.due + (0 if promising else 7 * record.pause):
                # One step more than a trial has: a draft that rested wakes first.
                self._trial, self._trial_ends = mode, self._step + TRIAL + 1
                self._records[other.mode].start_trial()
                return

    def _beats(self, home: Plan, other: Plan, lead: float) -> bool:
        """Whether this lead is worth a switch, and measured well enough not to be chance."""
        mine, its = self._records[home.mode], self._records[other.mode]
        return its.time.fresh(self._step) and lead > log(1 + LEAD) + ERRORS * sqrt(mine.variance + its.variance)

    def _judge_trial(self, plan: Plan, simple: tuple[Plan, Plan]) -> None:
        """End the trial when it is over, or as soon as it is seen to be in vain."""
        mode = self._trial
        assert mode is not None
        home, others = self._others(plan, simple)
        lead = self._corrected(others[mode]) - self._corrected(home) if mode in others else -CLAMP
        hopeless = lead < log(PROMISING) and (mode not in others or self._records[others[mode].mode].time.known)
        if self._step <= self._trial_ends and not hopeless:
            return
        self._trial, self._lead[mode] = None, lead
        record = self._records[mode]
        record.due = self._step + record.pause
        record.pause = min(2 * record.pause, LONGEST)
        if not hopeless and self._beats(home, others[mode], lead):
            self._switch(mode, home, others[mode], lead)

    def _switch(self, mode: Mode, home: Plan, other: Plan, lead: float) -> None:
        parts = {
            "plan": log(other.theta / home.theta),
            "time": self._records[home.mode].time.value - self._records[other.mode].time.value,
        }
        parts["tau"] = lead - sum(parts.values())
        self.switches.append(Switch(mode, max(parts, key=parts.__getitem__), exp(lead)))
        self.mode = mode
        self._ask_again()

    def _notice_another_load(self, requests: int) -> None:
        load = log(requests)
        if abs(load - self._load) > OTHER_LOAD:
            self._load = load
            self._ask_again()

    def _ask_again(self) -> None:
        self._lead.clear()
        for record in self._records.values():
            record.pause, record.due = SHORTEST, self._step + SHORTEST
