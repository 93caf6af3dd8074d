"""One step of a native DSpark draft, decided and learnt from: what to draft and verify, and what came of it.

A block draft makes all its gamma positions in one forward, so the depth is 0 (no draft forward at all) or gamma. Its
context is written from the target's hidden states after every verify, never by a draft forward: skipping the draft
costs the next one nothing, and nothing has to be kept warm.

The same code runs with and without overlap, on a CPU and on a GPU. Nothing is read from the device before the step's
outcome is on the host. The copies are under way by then: they are sent with the step, on the stream that computes it.
Sent later they would stand, on SGLang's schedule stream, behind what was launched meanwhile. So with overlap a plan
knows the confidence of two steps before, without of one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from math import nan
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.faults import Faults
from sglang_dspark.engine.metrics import Reports
from sglang_dspark.engine.policy import Policy
from sglang_dspark.engine.relay import HostCopy
from sglang_dspark.engine.requests import RequestTable
from sglang_dspark.engine.scheduler import Launched, StepBatch, StepScheduler
from sglang_dspark.schedule import Plan
from sglang_dspark.schedule.budget import Mode


class _Sent(NamedTuple):
    """A step whose outcome is not on the host yet."""

    launched: Launched
    lens: HostCopy
    """[R] int32, 1 + draft tokens verified."""
    seconds: float | None


class NativeScheduling:
    """Owns the step in progress, and those whose outcome has not come.

    Memory: with overlap two steps of R x (2 gamma + 1) numbers, beside what the scheduler has.
    """

    def __init__(
        self,
        requests: RequestTable,
        scheduler: StepScheduler,
        policy: Policy,
        faults: Faults,
        reports: Reports,
        agreement: Agreement,
        room: Callable[[int], int | None] = lambda requests: None,
    ) -> None:
        """agreement: of the tensor-parallel ranks, on the first one's plans.

        room: how many draft tokens of so many requests can be verified in rows of different length; None: any.
        """
        self.requests, self.scheduler, self.policy = requests, scheduler, policy
        self.faults, self.reports, self.agreement, self.room = faults, reports, agreement, room
        self.gamma = scheduler.gamma
        self.forced: float | None = None
        """Share of what is drafted to verify, in place of a plan's; None: plans decide."""
        self.plan = scheduler.verify_all(0)
        self._batch: StepBatch | None = None
        # Bounded, as an outcome that never comes takes none out; with overlap two steps are under way.
        self._waiting: deque[_Sent | None] = deque(maxlen=8)
        """One for each step whose outcome will come; None: of which nothing can be learnt."""

    # -- a step, in this order -------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        """Plan the step, from what is known before it drafts."""
        start = time.perf_counter()
        self._batch = described = self.requests.describe(batch)
        requests = len(described.slots)
        mine = self.faults.run(
            "plan", lambda: self.policy.plan(described, None), lambda: self.scheduler.verify_all(requests)
        )
        block = block_plan(mine, requests, self.gamma, self.forced)
        self.plan, _ = self.agreement.plan(described, self._within_room(block, requests), True)
        self._shown = torch.zeros(requests, 0, 1)
        self._confidence = torch.zeros(requests, self.gamma)
        self._tokens = self._shown.new_zeros(requests, 0, dtype=torch.long)
        self._lens = torch.ones(requests, dtype=torch.int32)
        rests = not (self.plan.depth or self.scheduler.warm)
        self.reports.planned(self.plan, rests, time.perf_counter() - start, self.scheduler.guard)

    def _within_room(self, plan: Plan, requests: int) -> Plan:
        """The plan cut to the room there is, and without its prediction; where there is none at all, everything."""
        room = self.room(requests)
        if self.forced is not None or room is None or plan.budget <= room:
            return plan
        if room < 0:
            return self.scheduler.verify_all(requests)  # what SGLang does then, whatever was planned
        cut = block_plan(plan._replace(budget=room), requests, self.gamma)
        return cut._replace(tau=nan, step_time=nan, theta=nan)

    def drafted(self, logits: Tensor, tokens: Tensor) -> None:
        """The step's draft: logits of the confidence head, known before a token was drawn, and tokens, [R, gamma].

        The logits are copied: out of a captured draft graph they lie in storage that the next step writes again.
        """
        self._shown, self._tokens = logits.to(torch.float32, copy=True)[..., None], tokens

    def lens(self, budget: int | None, device: torch.device) -> Tensor:
        """verify_lens [R] int32: the budget (the plan's; None too) split by the newest confidence.

        device: that they are wanted on, where no confidence is there to follow; moved there they would make the host
        wait. A fault gives every request an equal share: what is verified must fit the tier that the budget chose.
        """
        batch, plan = self._batch, self.plan
        assert batch is not None
        requests = len(batch.slots)
        plan = plan if budget is None else plan._replace(budget=budget)

        def share() -> tuple[Tensor, Tensor]:
            each = min(plan.budget // max(requests, 1), self.gamma)
            return self._confidence, torch.full((requests,), 1 + each, dtype=torch.int32, device=device)

        if not plan.depth:
            return torch.ones(requests, dtype=torch.int32, device=device)
        self._confidence, lens = self.faults.run(
            "allocation", lambda: self.policy.split(plan, batch, self._shown, self._tokens), share
        )
        return lens

    def verifies(self, lens: Tensor | None) -> None:
        """What the step verifies of each request, [R] int32; None: everything."""
        assert self._batch is not None
        if lens is None:
            lens = torch.full((len(self._batch.slots),), 1 + self.gamma, dtype=torch.int32)
        self._lens = lens

    def sent(self, tokens: int, seconds: float | None) -> None:
        """The step is under way. tokens: given to the target. seconds: it took; None where the host cannot tell yet."""
        self._waiting.append(self.faults.run("history", lambda: self._send(tokens, seconds), lambda: None))

    def _send(self, tokens: int, seconds: float | None) -> _Sent:
        assert self._batch is not None
        launched = self.scheduler.launched(self._batch, self.plan, self._shown, self._confidence, tokens)
        return _Sent(launched, HostCopy(self._lens), seconds)

    # -- its outcome -----------------------------------------------------------------------------------------------

    def outcome(self, accepted: NDArray[np.int64], seconds: float | None) -> None:
        """Learn from the oldest step whose outcome has not come: accepted draft tokens [R], bonus excluded.

        seconds: the step took, where it was not known when it was sent. A fault costs what this step would have taught:
        the outcomes of the steps behind it come all the same.
        """
        self.faults.run("learning", lambda: self._learn(accepted, seconds), lambda: None)

    def _learn(self, accepted: NDArray[np.int64], seconds: float | None) -> None:
        step = self._waiting.popleft() if self._waiting else None
        if step is None:
            return
        sent, took = step.launched, step.seconds if seconds is None else seconds
        if len(sent.batch.slots) != len(accepted):
            raise ValueError(f"an outcome of {len(accepted)} requests for a step of {len(sent.batch.slots)}")
        if took is not None and self.scheduler.timed(sent, took):
            self.reports.timed(sent.plan, took)
        verified = step.lens.read()[0].astype(np.int64) - 1
        self.reports.settled(self.scheduler.settle(sent, accepted, verified, self.requests.alive(sent.batch)))


def block_plan(plan: Plan, requests: int, gamma: int, forced: float | None = None) -> Plan:
    """A plan for a draft that makes all of its gamma positions or none.

    A plan of a depth between says how much is worth verifying; the positions that this leaves out are drafted anyway,
    and the split may choose them. forced: the share of all drafts to verify whatever the plan says.
    """
    everything = requests * gamma
    if forced is not None:
        nothing_known = float("nan")
        budget = max(0, min(int(forced * everything), everything))
        return Plan(gamma, budget, "scheduled", nothing_known, nothing_known, nothing_known)
    if not plan.depth or not plan.budget:
        return plan._replace(depth=0, budget=0, mode="no_draft")
    mode: Mode = "verify_all" if plan.budget >= everything else "scheduled"
    return plan._replace(depth=gamma, budget=min(plan.budget, everything), mode=mode)
