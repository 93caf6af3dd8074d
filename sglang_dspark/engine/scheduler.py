"""Joins the pure parts into one decision a step: how deep to draft, how much to verify, and what was learnt from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.confidence import Estimator, PositionPrior, Rows
from sglang_dspark.confidence.estimator import to_device
from sglang_dspark.cost import CostModel
from sglang_dspark.engine.relay import HostCopy
from sglang_dspark.kernels.allocate import MAX_REQUESTS, allocate
from sglang_dspark.observe import TraceWriter
from sglang_dspark.schedule import ConfidenceHistory, DraftRest, Guard, Plan, plan_joint, plan_simple

# A position that nobody verified for this many steps is tried once: acceptance may have come back. At 128 the probe,
# one depth deeper than planned, costs well below 1% of throughput even where drafting does not pay.
PROBE_STEPS = 128


# What a draft token counts for at least when the budget is split. Its 16th power, of the longest chain, is a normal
# float32, so that no survival is 0. Below it, and for NaN, drafts are taken last, in order of position.
LEAST_CONFIDENCE = 0.005


class StepBatch(NamedTuple):
    """What is known of a step's R requests on the host before it drafts."""

    slots: NDArray[np.int64]
    """[R] index in SGLang's request table."""
    generations: NDArray[np.int64]
    """[R] which request holds the slot: another request in the same slot has another number."""
    rule: NDArray[np.int64]
    """[R] verify rule, index into confidence.RULES: 0 greedy, 1 sampled."""
    clean: NDArray[np.bool_]
    """[R] whether the request counts in pooled statistics (no grammar, penalties or logit bias)."""
    kv_tokens: int
    """Context of all requests together, tokens."""
    iteration: int = 0
    """SGLang's count of batches, prefill included."""
    left: NDArray[np.int64] | None = None
    """[R] tokens that each may still give, as far as its outcomes are known; None: no limit is known."""

    @property
    def rows(self) -> Rows:
        """Whose rows these are, as the estimator wants it."""
        return Rows(self.slots, self.generations, self.rule)


@dataclass
class Launched:
    """A step whose outcome is not known yet. It travels with SGLang's result, which brings the outcome."""

    step: int
    batch: StepBatch
    plan: Plan
    recent: NDArray[np.float32]
    """[R] recent acceptance when the step was scheduled."""
    sent: HostCopy
    """[R, depth, features] shown by the draft, and the [R, gamma] confidence the step went by."""
    tokens: int
    """Given to the target forward."""
    priced: bool
    """Whether the plan's step time is that of what really ran."""
    seconds: float = float("nan")


class _AllocationInputs(NamedTuple):
    """What the allocation reads beside the confidence, kept on the device."""

    rows: Tensor
    """[slots] 0, 1, 2, ..."""
    prior: Tensor
    """[gamma] unread: every request of the step was drafted, so none takes a prior."""
    budget: Tensor
    """Scalar int32."""

    @classmethod
    def on(cls, device: torch.device, slots: int, gamma: int) -> _AllocationInputs:
        budget = torch.zeros((), dtype=torch.int32, device=device)
        return cls(torch.arange(slots, device=device), torch.zeros(gamma, device=device), budget)


class Settled(NamedTuple):
    """A step and its outcome."""

    plan: Plan
    verified: NDArray[np.int64]
    """[R] draft tokens the target saw."""
    accepted: NDArray[np.int64]
    """[R] of them accepted."""
    tokens: int
    """Given to the target forward."""
    confidence: NDArray[np.float32]
    """[R, gamma] that the step went by."""
    alive: NDArray[np.bool_]
    """[R] whether the request still ran, and so was given its tokens."""


def tokens_sent(plan: Plan, requests: int) -> int:
    """Tokens the target is given in a step: the host's count of what is on the device."""
    return requests + min(plan.budget, requests * plan.depth)


def spread(plan: Plan, requests: int, device: torch.device) -> Tensor:
    """verify_lens [R] int32 that spend the plan's budget evenly: for a step whose allocation failed."""
    share, left = divmod(tokens_sent(plan, requests) - requests, max(requests, 1))
    lens = torch.full((requests,), 1 + share, dtype=torch.int32, device=device)
    lens[:left] += 1
    return lens


def past_end(batch: StepBatch, depth: int) -> NDArray[np.bool_] | None:
    """[R, depth] the draft positions that a request cannot give any more; None where there are none.

    With one token left to give a request needs no draft, as the target's own token ends it.
    """
    if batch.left is None or not depth or batch.left.min(initial=depth + 1) > depth:
        return None
    return np.arange(2, depth + 2) > batch.left[:, None]


class StepScheduler:
    """Owns history, priors, estimator and cost of one server, and its counters.

    Memory: slots x (12 x gamma + 48) bytes of history, and a cost curve of about 2 x R x (gamma + 1) doubles.
    """

    def __init__(self, slots: int, gamma: int, estimator: Estimator | None = None) -> None:
        self.slots, self.gamma = slots, gamma
        self.cost: CostModel | None = None
        """Step times; None until a profile was taken, and then everything drafted is verified."""
        self.history = ConfidenceHistory(slots, gamma)
        self.priors = (PositionPrior(gamma), PositionPrior(gamma))
        self.estimator = estimator or Estimator(slots, gamma)
        self.extends = True
        """Whether a step without a draft runs the draft's extend unless the draft rests; native drafts have none."""
        self.trace: TraceWriter | None = None
        """Where steps are recorded; None: nowhere."""
        self.rest = DraftRest()
        self.guard = Guard()
        self.warm = True
        """Whether the draft extend of this step runs, so that the next one can draft."""
        self.counters: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()
        self.depths: Counter[int] = Counter()
        self.last_plan: Plan | None = None
        self._inputs: _AllocationInputs | None = None
        self._step = 0
        self._seen_at = np.zeros(gamma, np.int64)

    # -- before the draft ------------------------------------------------------------------------------------------

    def plan(self, batch: StepBatch, first_shown: Tensor | None) -> Plan:
        """Depth and budget from history at least one step old.

        first_shown: [R, features] what the draft showed of position 1, where it can be read without waiting for a
        device; it was left by the last step's draft extend, so it is as old as the history.
        """
        self._step += 1
        requests = len(batch.slots)
        if self.cost is None:
            return self.verify_all(requests)
        prior = self._prior_rows(batch.rule)
        if not self.warm:
            confidence = prior  # nothing was drafted lately, so this is all that is known of any request
        else:
            confidence, _ = self.history.lookup(self._step, batch.slots, batch.generations, prior)
            if first_shown is not None:
                confidence[:, 0] = self.estimator.evaluate(first_shown[:, None], batch.rows)[:, 0].cpu().numpy()
        past = past_end(batch, self.gamma)
        if past is not None:
            confidence[past] = 0.0
        resting_time = self.cost.bind(requests, batch.kv_tokens)
        step_time = self.cost.bind(requests, batch.kv_tokens, warm=True) if self.extends else resting_time
        seconds = float(resting_time(0, np.array([requests]))[0])
        planned = plan_joint(confidence, step_time, max_depth=self.gamma)
        pays = planned.depth > 0 and planned.theta >= requests / seconds
        # What a step is worth where the draft may rest, which is what the guard compares modes by.
        seen = planned if pays else planned._replace(theta=max(planned.theta, requests / seconds))
        plan = self.guard.choose(seen, requests, lambda: plan_simple(confidence, resting_time, max_depth=self.gamma))
        if plan is seen:
            plan = self._probe(planned, requests)
        elif not plan.depth:
            self.warm = False
            return plan
        # A trial is there to see whether the plans are right, so that they say it does not pay ends none.
        tried = self.guard.trial not in (None, "no_draft")
        drafts = self.rest.step(pays or tried or plan is not planned, requests)
        self.warm = not self.rest.resting
        if drafts:
            return plan
        return Plan(0, 0, "no_draft", float(requests), seconds, requests / seconds)

    def verify_all(self, requests: int, depth: int | None = None) -> Plan:
        """The plan that needs no estimate: draft ``depth`` (gamma) positions and verify them all."""
        depth = self.gamma if depth is None else depth
        return Plan(depth, requests * depth, "verify_all", float("nan"), float("nan"), float("nan"))

    def _probe(self, plan: Plan, requests: int) -> Plan:
        # While resting, plans come from priors, which cannot tell how deep the draft would go; position 1 counts then.
        # The deepest position is probed like the others: a plan for it may be one that pays less than a rest.
        depth = 0 if self.rest.resting else min(plan.depth, self.gamma - 1)
        if self._step - self._seen_at[depth] <= PROBE_STEPS:
            return plan
        if self.rest.resting:
            self.rest.wake()  # the draft must be warm before it can be probed: at the next step
            return plan
        self._seen_at[depth] = self._step
        self.modes["probe"] += 1
        return self.verify_all(requests, depth + 1)

    # -- between draft and verify ----------------------------------------------------------------------------------

    def confidence(self, shown: Tensor, batch: StepBatch) -> Tensor:
        """[R, depth, features] shown by the newest draft to [R, gamma] confidence; 0 past what was drafted."""
        confidence = shown.new_zeros(len(batch.slots), self.gamma)
        if shown.shape[1]:
            confidence[:, : shown.shape[1]] = self.estimator.evaluate(shown, batch.rows)
        return confidence

    def usable(self, confidence: Tensor, plan: Plan, batch: StepBatch) -> Tensor:
        """The confidence [R, gamma] to allocate by: 0 for positions past the end of a request that is about to end."""
        past = past_end(batch, plan.depth)
        if past is None:
            return confidence
        usable = confidence.clone()
        usable[:, : plan.depth].masked_fill_(to_device(past, confidence.device), 0.0)
        return usable

    def allocate(self, plan: Plan, confidence: Tensor) -> Tensor:
        """Split the plan's budget by the newest confidence: verify_lens [R] int32, on the device of ``confidence``.

        All of it is spent: they add up to :func:`tokens_sent`.
        """
        # Positive, so that every drafted position can be chosen: the lengths then add up to R plus the budget, which
        # the host has to know before it can read them.
        confidence = confidence.nan_to_num(nan=LEAST_CONFIDENCE).clamp(min=LEAST_CONFIDENCE)
        if self._inputs is None:
            self._inputs = _AllocationInputs.on(confidence.device, self.slots, self.gamma)
        rows, unused, budget = self._inputs
        amount = plan.budget if confidence.is_cpu else budget.fill_(plan.budget)
        return allocate(confidence, rows[: len(confidence)], unused, amount, depth=plan.depth).verify_lens

    def compile_allocation(self, device: torch.device) -> None:
        """Allocate for every size of batch that the kernel is compiled for: a step must not wait for a compiler."""
        sizes = {min(1 << power, self.slots) for power in range(MAX_REQUESTS.bit_length())}
        for requests in sorted(sizes):
            self.allocate(self.verify_all(requests), torch.ones(requests, self.gamma, device=device))

    def launched(self, batch: StepBatch, plan: Plan, shown: Tensor, confidence: Tensor, tokens: int) -> Launched:
        """Note a step that was sent, and the tokens the target forward was really given. Waits for nothing."""
        self.last_plan = plan
        self.modes[plan.mode] += 1
        self.depths[plan.depth] += 1
        self.counters["rest_steps"] += not (self.warm or plan.depth)
        recent = self.estimator.recent(batch.rows)
        # Of the steps without a draft only those of a rest are priced: the others run the extend as well.
        priced = plan.step_time == plan.step_time and (plan.depth > 0 or not self.warm)
        return Launched(self._step, batch, plan, recent, HostCopy(shown, confidence), tokens, priced)

    # -- after the verify ------------------------------------------------------------------------------------------

    def settle(
        self,
        sent: Launched,
        accepted: NDArray[np.int64],
        verified: NDArray[np.int64],
        alive: NDArray[np.bool_] | None = None,
    ) -> Settled:
        """Learn from a step and its outcome. Steps settle in the order they were launched in.

        accepted, verified: [R] draft tokens, bonus and anchor excluded. alive: [R] whether the request still ran when
        the outcome came; under the overlap schedule one that has ended takes part in one more step, of which nothing is
        learnt.
        """
        shown, confidence = sent.sent.read()
        row = self._prior_rows(sent.batch.rule)
        row[:, : sent.plan.depth] = confidence[:, : sent.plan.depth]
        self.history.record(sent.step, sent.batch.slots, sent.batch.generations, row)
        requests = len(verified)
        self.counters.update(
            steps=1,
            requests=requests,
            drafted=requests * sent.plan.depth,
            verified=int(verified.sum()),
            accepted=int(accepted.sum()),
            produced=int(accepted.sum()) + requests,
            target_tokens=sent.tokens,
            target_tokens_full=requests * (self.gamma + 1),
        )
        reached = verified.max(initial=0)
        np.maximum(self._seen_at[:reached], sent.step, out=self._seen_at[:reached])
        alive = np.ones(requests, np.bool_) if alive is None else alive
        clean = sent.batch.clean & alive
        if self.trace is not None:
            self._record(sent, shown, confidence, clean, accepted, verified)
        if sent.priced:
            self.guard.observe(sent.plan, int(accepted.sum()) + requests, sent.seconds)
        settled = Settled(sent.plan, verified, accepted, sent.tokens, confidence, alive)
        if not sent.plan.depth:
            return settled
        rule = sent.batch.rule
        for index, prior in enumerate(self.priors):
            mine = clean & (rule == index)
            if mine.any():
                prior.observe(accepted[mine], verified[mine])
        self.estimator.observe(shown, sent.recent, sent.batch.rows, accepted, verified, clean)
        return settled

    def timed(self, sent: Launched, seconds: float) -> bool:
        """Correct the cost model by a step that took ``seconds``; whether that time had been predicted."""
        sent.seconds = seconds
        if self.cost is not None and sent.priced:
            self.cost.observe(sent.tokens, sent.plan.step_time, seconds)
        return sent.priced

    # -- inside ----------------------------------------------------------------------------------------------------

    def _prior_rows(self, rule: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.stack([prior.values() for prior in self.priors])[rule]

    def _record(
        self,
        sent: Launched,
        shown: NDArray[np.float32],
        confidence: NDArray[np.float32],
        clean: NDArray[np.bool_],
        accepted: NDArray[np.int64],
        verified: NDArray[np.int64],
    ) -> None:
        assert self.trace is not None
        batch = sent.batch
        whole = np.full((len(shown), self.gamma, shown.shape[2]), np.nan, np.float32)
        whole[:, : shown.shape[1]] = shown
        self.trace.write(
            len(accepted),
            step=sent.step,
            request=batch.generations * self.slots + batch.slots,
            rule=batch.rule,
            clean=clean,
            depth=sent.plan.depth,
            verified=verified,
            accepted=accepted,
            budget=sent.plan.budget,
            tokens=sent.tokens,
            kv_tokens=batch.kv_tokens,
            seconds=sent.seconds,
            recent=sent.recent,
            shown=whole,
            confidence=confidence,
        )

    def info(self) -> dict[str, Any]:
        """Plan, counters and estimates, as plain JSON types."""
        plan = self.last_plan
        return {
            **self.counters,
            "accepted_length": (self.counters["produced"] / self.counters["requests"])
            if self.counters["requests"]
            else None,
            "modes": dict(self.modes),
            "rests": self.rest.rests,
            "guard": self.guard.info(),
            "depths": {str(depth): count for depth, count in sorted(self.depths.items())},
            "last_plan": None if plan is None else {k: _number(v) for k, v in plan._asdict().items()},
            "prior": {
                name: [round(float(v), 4) for v in prior.values()]
                for name, prior in zip(("greedy", "sampled"), self.priors, strict=True)
            },
        }


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and value != value else value
