"""Joins the pure parts into one decision a step: how deep to draft, how much to verify, and what was learnt from it."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.confidence import Estimator, PositionPrior, Rows
from sglang_dspark.cost import CostModel
from sglang_dspark.kernels.allocate import allocate
from sglang_dspark.observe import TraceWriter
from sglang_dspark.schedule import ConfidenceHistory, DraftRest, Guard, Plan, plan_joint, plan_simple

# A position that nobody verified for this many steps is tried once: acceptance may have come back. At 128 the probe,
# one depth deeper than planned, costs well below 1% of throughput even where drafting does not pay.
PROBE_STEPS = 128


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

    @property
    def rows(self) -> Rows:
        """Whose rows these are, as the estimator wants it."""
        return Rows(self.slots, self.generations, self.rule)


class _Launched(NamedTuple):
    """A step whose outcome is not known yet."""

    step: int
    batch: StepBatch
    plan: Plan
    shown: Tensor
    recent: NDArray[np.float32]
    confidence: Tensor
    verify_lens: Tensor
    tokens: int
    priced: bool
    """Whether the plan's step time is that of what really ran."""
    seconds: float = float("nan")


class Settled(NamedTuple):
    """A step and its outcome."""

    plan: Plan
    verified: NDArray[np.int64]
    """[R] draft tokens the target saw."""
    accepted: NDArray[np.int64]
    """[R] of them accepted."""
    tokens: int
    """Given to the target forward."""
    confidence: Tensor
    """[R, gamma] that the step went by."""


class StepScheduler:
    """Owns history, priors, estimator and cost of one server, and its counters.

    Memory: slots x (8 x gamma + 32) bytes of history, and a cost curve of about 2 x R x (gamma + 1) doubles.
    """

    def __init__(self, slots: int, gamma: int, estimator: Estimator | None = None) -> None:
        self.slots, self.gamma = slots, gamma
        self.cost: CostModel | None = None
        """Step times; None until a profile was taken, and then everything drafted is verified."""
        self.history = ConfidenceHistory(slots, gamma)
        self.priors = (PositionPrior(gamma), PositionPrior(gamma))
        self.estimator = estimator or Estimator(slots, gamma)
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
        self._step = 0
        self._seen_at = np.zeros(gamma, np.int64)
        self._waiting: deque[_Launched] = deque()

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
        step_time = self.cost.bind(requests, batch.kv_tokens)
        planned = plan_joint(confidence, step_time, max_depth=self.gamma)
        plan = self.guard.choose(planned, requests, lambda: plan_simple(confidence, step_time, max_depth=self.gamma))
        if plan is planned:
            plan = self._probe(plan, requests)
        elif not plan.depth:
            self.warm = False
            return plan
        depth = self.rest.step(plan.depth, requests)
        self.warm = not self.rest.resting
        if depth == plan.depth:
            return plan
        seconds = float(step_time(0, np.array([requests]))[0])
        return Plan(0, 0, "no_draft", float(requests), seconds, requests / seconds)

    def verify_all(self, requests: int, depth: int | None = None) -> Plan:
        """The plan that needs no estimate: draft ``depth`` (gamma) positions and verify them all."""
        depth = self.gamma if depth is None else depth
        return Plan(depth, requests * depth, "verify_all", float("nan"), float("nan"), float("nan"))

    def _probe(self, plan: Plan, requests: int) -> Plan:
        if plan.depth == self.gamma or self._step - self._seen_at[plan.depth] <= PROBE_STEPS:
            return plan
        if self.rest.resting:
            self.rest.wake()  # the draft must be warm before it can be probed: at the next step
            return plan
        self._seen_at[plan.depth] = self._step
        self.modes["probe"] += 1
        return self.verify_all(requests, plan.depth + 1)

    # -- between draft and verify ----------------------------------------------------------------------------------

    def confidence(self, shown: Tensor, batch: StepBatch) -> Tensor:
        """[R, depth, features] shown by the newest draft to [R, gamma] confidence; 0 past what was drafted."""
        confidence = shown.new_zeros(len(batch.slots), self.gamma)
        if shown.shape[1]:
            confidence[:, : shown.shape[1]] = self.estimator.evaluate(shown, batch.rows)
        return confidence

    def allocate(self, plan: Plan, confidence: Tensor) -> Tensor:
        """Split the plan's budget by the newest confidence: verify_lens [R] int32, on the device of ``confidence``."""
        requests = len(confidence)
        rows = torch.arange(requests, device=confidence.device)
        unused = confidence.new_zeros(self.gamma)  # every request of the step was drafted, so none takes a prior
        budget = (
            plan.budget if confidence.is_cpu else torch.tensor(plan.budget, dtype=torch.int32).to(confidence.device)
        )
        return allocate(confidence, rows, unused, budget, depth=plan.depth).verify_lens

    def launched(
        self, batch: StepBatch, plan: Plan, shown: Tensor, confidence: Tensor, lens: Tensor, tokens: int
    ) -> None:
        """Note a step that was sent: lens [R], and the tokens the target forward was really given."""
        row = self._prior_rows(batch.rule)
        row[:, : plan.depth] = confidence[:, : plan.depth].cpu().numpy()
        self.history.record(self._step, batch.slots, batch.generations, row)
        recent = self.estimator.recent(batch.rows)
        # Of the steps without a draft only those of a rest are priced: the others run the extend as well.
        priced = plan.step_time == plan.step_time and (plan.depth > 0 or not self.warm)
        self._waiting.append(_Launched(self._step, batch, plan, shown, recent, confidence, lens, tokens, priced))
        self.last_plan = plan
        self.modes[plan.mode] += 1
        self.depths[plan.depth] += 1
        self.counters["rest_steps"] += not (self.warm or plan.depth)

    # -- after the verify ------------------------------------------------------------------------------------------

    def settle(self, accepted: NDArray[np.int64]) -> Settled | None:
        """Learn from the oldest step not settled, if there is one: accepted draft tokens [R], bonus excluded."""
        if not self._waiting:
            return None
        sent = self._waiting.popleft()
        verified = sent.verify_lens.cpu().numpy().astype(np.int64) - 1
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
        self._seen_at[:reached] = sent.step
        shown = sent.shown.cpu().numpy()
        if self.trace is not None:
            self._record(sent, shown, accepted, verified)
        if sent.priced:
            self.guard.observe(sent.plan, int(accepted.sum()) + requests, sent.seconds)
        settled = Settled(sent.plan, verified, accepted, sent.tokens, sent.confidence)
        if not sent.plan.depth:
            return settled
        clean, rule = sent.batch.clean, sent.batch.rule
        for index, prior in enumerate(self.priors):
            mine = clean & (rule == index)
            if mine.any():
                prior.observe(accepted[mine], verified[mine])
        self.estimator.observe(shown, sent.recent, sent.batch.rows, accepted, verified, clean)
        return settled

    def timed(self, plan: Plan, tokens: int, seconds: float) -> bool:
        """Correct the cost model by a step that took ``seconds``; whether that time had been predicted."""
        if not self._waiting:
            return False
        sent = self._waiting[-1] = self._waiting[-1]._replace(seconds=seconds)
        if self.cost is not None and sent.priced:
            self.cost.observe(tokens, plan.step_time, seconds)
        return sent.priced

    def forget_waiting(self) -> None:
        """Drop steps whose outcome never comes (a batch that was thrown away)."""
        self._waiting.clear()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _prior_rows(self, rule: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.stack([prior.values() for prior in self.priors])[rule]

    def _record(
        self, sent: _Launched, shown: NDArray[np.float32], accepted: NDArray[np.int64], verified: NDArray[np.int64]
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
            clean=batch.clean,
            depth=sent.plan.depth,
            verified=verified,
            accepted=accepted,
            budget=sent.plan.budget,
            tokens=sent.tokens,
            kv_tokens=batch.kv_tokens,
            seconds=sent.seconds,
            recent=sent.recent,
            shown=whole,
            confidence=sent.confidence.cpu().numpy(),
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
