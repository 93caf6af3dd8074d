"""A server in miniature: the real step scheduler against requests and a machine whose truth a test sets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_dspark.confidence import draft_features
from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler
from sglang_dspark.schedule import Plan

GAMMA = 5
# Milliseconds of a small server: target 10 + 0.2 a token, a draft forward 1, an extend 0.5.
BELIEVED = CostTable(tokens=(1, 64), seconds=(10.2e-3, 22.8e-3), draft_fixed=1e-3, extend_fixed=0.5e-3)


def shown_at(top: float, *shape: int) -> torch.Tensor:
    """What a draft shows whose best of three tokens has probability ``top``, the others alike; [*shape, features]."""
    rest = (1 - top) / 2
    return draft_features(torch.tensor([top, rest, rest]).log()[None])[0].expand(*shape, -1)


def drive(
    it: StepScheduler,
    batch: StepBatch,
    first: torch.Tensor,
    shown: Callable[[int], torch.Tensor],
    accepted: Callable[[np.ndarray], np.ndarray],
    takes: Callable[[Plan, int], float] | None = None,
) -> tuple[Plan, np.ndarray, np.ndarray]:
    """One step as a worker runs it: the plan, and draft tokens verified and accepted [R].

    first: [R, features] shown of position 1. shown: of as many positions, [R, depth, features]. accepted: given what is
    verified. takes: seconds of a plan with so many tokens.
    """
    warm = it.warm
    plan = it.plan(batch, first)
    if plan.depth and not warm:  # nothing to draft from after a step without an extend
        it.warm, plan = True, it.verify_all(len(batch.slots), 0)
    seen = shown(plan.depth)
    confidence = it.confidence(seen, batch)
    lens = it.allocate(plan, confidence)
    tokens = int(lens.sum())
    sent = it.launched(batch, plan, seen, confidence, tokens)
    if takes is not None:
        it.timed(sent, takes(plan, tokens))
    verified = lens.numpy().astype(np.int64) - 1
    hits = accepted(verified)
    it.settle(sent, hits, verified)
    return plan, verified, hits


class Loop:
    """Steps of R requests; each drafted token is accepted with probability ``accept``, ``speed`` scales step times."""

    def __init__(
        self,
        requests: int,
        accept: float,
        speed: Callable[[Plan], float] = lambda plan: 1.0,
        seed: int = 0,
        gamma: int = GAMMA,
        table: CostTable = BELIEVED,
    ) -> None:
        self.requests, self.accept, self.speed, self.gamma, self.table = requests, accept, speed, gamma, table
        self.shows: float | None = None
        """Top probability that the draft shows; None: ``accept`` itself."""
        self.scheduler = StepScheduler(slots=requests, gamma=gamma)
        self.scheduler.cost = CostModel(table, max_depth=gamma)
        self.random = np.random.default_rng(seed)
        self.truth = CostModel(table, max_depth=gamma)
        self.plans: list[Plan] = []
        self.hits_of: Callable[[np.random.Generator], np.ndarray] = lambda random: (
            random.random((self.requests, self.gamma)) < self.accept
        )
        """[R, gamma] whether each drafted token is accepted where it is reached."""

    def seconds(self, plan: Plan, tokens: int) -> float:
        true = float(self.truth.step_time(self.requests, plan.depth, tokens, 100 * self.requests))
        if not plan.depth and self.scheduler.warm:
            true += self.table.extend_fixed
        return true * self.speed(plan) * float(np.exp(self.random.normal(0, 0.05)))

    def run(self, steps: int) -> float:
        """Tokens per second over so many steps."""
        rows = np.arange(self.requests)
        batch = StepBatch(rows, rows, rows * 0, rows == rows, 100 * self.requests)
        tokens, seconds = 0, 0.0

        def takes(plan: Plan, sent: int) -> float:
            nonlocal seconds
            took = self.seconds(plan, sent)
            seconds += took
            return took

        for _ in range(steps):
            top = self.accept if self.shows is None else self.shows
            plan, _, hits = drive(
                self.scheduler,
                batch,
                shown_at(top, self.requests),
                lambda depth, top=top: shown_at(top, self.requests, depth),
                lambda verified: np.minimum(np.cumprod(self.hits_of(self.random), 1).sum(1), verified),
                takes,
            )
            self.plans.append(plan)
            tokens += int(hits.sum()) + self.requests
        return tokens / seconds

    def rate(self, depth: int) -> float:
        """Tokens per second of a fixed depth, everything verified; 0 is plain decoding."""
        plan = self.scheduler.verify_all(self.requests, depth)
        time = float(self.truth.step_time(self.requests, depth, self.requests * (1 + depth), 100 * self.requests))
        return self.requests * sum(self.accept**k for k in range(depth + 1)) / (time * self.speed(plan))
