"""Verify policies that tests force on a server through DSPARK_POLICY."""

import os
from pathlib import Path

import torch

from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.engine.policy import Policy

# Pads every verify but those of 1, 7, 12, ... tokens, also where all rows are full; and none, whatever was profiled.
_TIERS = (1, 7, *range(12, 400, 5))
PADDED = CostModel(
    CostTable((1, 400), (0.1, 0.2), tiers=_TIERS, padded=tuple(n for n in range(1, 397) if n not in _TIERS))
)
UNPADDED = CostModel(CostTable((1, 400), (0.1, 0.2)))


class Switch(Policy):
    """Does what the file named by TEST_POLICY_FILE says, which is read anew each step.

    own, none, all, random, budgets, depths, pads, rests.
    """

    def __init__(self, scheduler):
        super().__init__(scheduler)
        self.file = Path(os.environ["TEST_POLICY_FILE"])
        self.random = torch.Generator().manual_seed(0)
        self.depth = -1
        self.budget = 0
        self.own = None

    def _says(self):
        return self.file.read_text().strip()

    def _next_depth(self):
        """0, 1, ..., gamma, 0, ...: a short run still meets every depth."""
        self.depth = (self.depth + 1) % (self.scheduler.gamma + 1)
        return self.depth

    def plan(self, batch, first_shown):
        self.own = self.own or self.scheduler.cost
        self.scheduler.cost = {"own": self.own, "pads": PADDED}.get(self._says(), UNPADDED)
        plan = super().plan(batch, first_shown)
        if self._says() == "own":
            return plan
        gamma, says = self.scheduler.gamma, self._says()
        self.scheduler.warm = True
        if says == "budgets":  # another one every step, split by the scheduler itself
            most = gamma * len(batch.slots)
            self.budget = (self.budget + 7) % (most + 1)
            return self.scheduler.verify_all(len(batch.slots), gamma)._replace(budget=self.budget)
        if says == "rests":  # at depth 0 the draft may rest, and what it then drafts comes from stubs
            self.scheduler.warm = bool(torch.randint(2, (), generator=self.random))
        depth = self._next_depth() if says in ("depths", "rests", "pads") else gamma
        return self.scheduler.verify_all(len(batch.slots), depth)

    def allocate(self, plan, confidence, draft):
        says = self._says()
        if says in ("own", "all", "budgets"):
            return super().allocate(plan, confidence, draft)
        if says == "none":
            return torch.ones(len(confidence), dtype=torch.int32)
        return torch.randint(1, plan.depth + 2, (len(confidence),), generator=self.random, dtype=torch.int32)


class Peek(Policy):
    """Breaks the rule for sampled drafts: admits a draft only where its sampled token is an even one."""

    position = 0

    def plan(self, batch, first_shown):
        # Less than everything: a worker that verifies everything asks for no allocation.
        requests, gamma = len(batch.slots), self.scheduler.gamma
        return self.scheduler.verify_all(requests)._replace(budget=requests * (gamma - 1))

    def allocate(self, plan, confidence, draft):
        return torch.where(draft[:, self.position] % 2 == 0, plan.depth, 1).to(torch.int32)


class PeekBeyond(Peek):
    """Looks at position 2. SGLang tests the first draft that a native schedule leaves out, too, against the anchor's
    logits, which are there anyway: a look at position 1 alone changes no distribution."""

    position = 1


class Broken(Policy):
    """Fails at everything: what a fault of ours looks like to the worker."""

    def plan(self, batch, first_shown):
        raise RuntimeError("planted")

    def allocate(self, plan, confidence, draft):
        raise RuntimeError("planted")


class Off(Policy):
    """Never drafts and lets the draft rest: what is left is the cost of our worker itself."""

    def plan(self, batch, first_shown):
        super().plan(batch, first_shown)
        self.scheduler.warm = False
        return self.scheduler.verify_all(len(batch.slots), 0)


class Half(Policy):
    """Forces half of what is drafted, whatever anything costs."""

    def plan(self, batch, first_shown):
        return self.scheduler.verify_all(len(batch.slots))._replace(budget=len(batch.slots) * self.scheduler.gamma // 2)
