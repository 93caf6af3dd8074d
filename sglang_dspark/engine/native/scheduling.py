"""One step of a native DSpark draft, decided and learnt from: what to draft and verify, and what came of it.

A block draft makes all its gamma positions in one forward, so the depth is 0 (no draft forward at all) or gamma. Its
context is written from the target's hidden states after every verify, never by a draft forward: skipping the draft
costs the next one nothing, and nothing has to be kept warm.

The same code runs with and without overlap, on a CPU and on a GPU. Nothing is read from the device before the step's
outcome is on the host; then what belongs to the step has been computed long since. So with overlap a plan knows the
confidence of two steps before, without of one.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.faults import Faults
from sglang_dspark.engine.metrics import Reports
from sglang_dspark.engine.policy import Policy
from sglang_dspark.engine.requests import RequestTable
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler
from sglang_dspark.schedule import Plan
from sglang_dspark.schedule.budget import Mode


class _Sent(NamedTuple):
    """A step whose outcome is not on the host yet; tensors where they were computed."""

    batch: StepBatch
    plan: Plan
    shown: Tensor
    """[R, gamma, 1] the confidence head's logit; [R, 0, 1] without a draft."""
    confidence: Tensor
    """[R, gamma]"""
    lens: Tensor
    """[R] int32, 1 + draft tokens verified."""
    tokens: int
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
    ) -> None:
        """agreement: of the tensor-parallel ranks, on the first one's plans."""
        self.requests, self.scheduler, self.policy = requests, scheduler, policy
        self.faults, self.reports, self.agreement = faults, reports, agreement
        self.gamma = scheduler.gamma
        self.forced: float | None = None
        """Share of what is drafted to verify, in place of a plan's; None: plans decide."""
        self.plan = scheduler.verify_all(0)
        self._batch: StepBatch | None = None
        self._waiting: deque[_Sent] = deque()

    # -- a step, in this order -------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        """Plan the step, from what is known before it drafts."""
        start = time.perf_counter()
        self._batch = described = self.requests.describe(batch)
        requests = len(described.slots)
        mine = self.faults.run(
            "plan", lambda: self.policy.plan(described, None), lambda: self.scheduler.verify_all(requests)
        )
        self.plan, _ = self.agreement.plan(described, block_plan(mine, requests, self.gamma, self.forced), True)
        self._shown = torch.zeros(requests, 0, 1)
        self._confidence = torch.zeros(requests, self.gamma)
        self._tokens = self._shown.new_zeros(requests, 0, dtype=torch.long)
        self._lens = torch.ones(requests, dtype=torch.int32)
        rests = not (self.plan.depth or self.scheduler.warm)
        self.reports.planned(self.plan, rests, time.perf_counter() - start, self.scheduler.guard)

    def drafted(self, logits: Tensor, tokens: Tensor) -> None:
        """The step's draft: logits of the confidence head, known before a token was drawn, and tokens, [R, gamma].

        The logits are copied: out of a captured draft graph they lie in storage that the next step writes again.
        """
        self._shown, self._tokens = logits.to(torch.float32, copy=True)[..., None], tokens

    def lens(self, budget: int | None) -> Tensor:
        """verify_lens [R] int32: the budget (the plan's; None too) split by the newest confidence.

        A fault gives every request an equal share: what is verified must fit the tier that the budget chose.
        """
        batch, plan = self._batch, self.plan
        assert batch is not None
        requests = len(batch.slots)
        plan = plan if budget is None else plan._replace(budget=budget)

        def share() -> tuple[Tensor, Tensor]:
            each = min(plan.budget // max(requests, 1), self.gamma)
            return self._confidence, torch.full((requests,), 1 + each, dtype=torch.int32)

        if not plan.depth:
            return torch.ones(requests, dtype=torch.int32)
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
        assert self._batch is not None
        self._waiting.append(_Sent(self._batch, self.plan, self._shown, self._confidence, self._lens, tokens, seconds))

    # -- its outcome -----------------------------------------------------------------------------------------------

    def outcome(self, accepted: NDArray[np.int64], seconds: float | None) -> None:
        """Learn from the oldest step whose outcome has not come: accepted draft tokens [R], bonus excluded.

        seconds: the step took, where it was not known when it was sent.
        """
        self.faults.run("learning", lambda: self._learn(accepted, seconds), self.forget)

    def forget(self) -> None:
        """Drop the steps whose outcome has not come."""
        self._waiting.clear()

    def _learn(self, accepted: NDArray[np.int64], seconds: float | None) -> None:
        if not self._waiting:
            return
        step = self._waiting.popleft()
        if len(step.batch.slots) != len(accepted):
            raise ValueError(f"an outcome of {len(accepted)} requests for a step of {len(step.batch.slots)}")
        plan, tokens, took = step.plan, step.tokens, step.seconds if seconds is None else seconds
        sent = self.scheduler.launched(step.batch, plan, step.shown, step.confidence, tokens)
        if took is not None and self.scheduler.timed(sent, took):
            self.reports.timed(plan, took)
        verified = step.lens.cpu().numpy().astype(np.int64) - 1
        self.reports.settled(self.scheduler.settle(sent, accepted, verified, self.requests.alive(step.batch)))


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
