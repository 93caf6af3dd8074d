"""Serving on a clock of its own: the real scheduler beside drafts of known acceptance and steps of known time."""

from typing import NamedTuple

import numpy as np
import torch

from sglang_dspark.confidence import FEATURES, draft_features
from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler
from sglang_dspark.schedule import Plan
from tests.unit.closed_loop import drive

GAMMA, CONTEXT, LENGTH = 5, 512, 128


class Machine(NamedTuple):
    """Milliseconds: of the target's forward, its tokens up to a knee and beyond it, a draft forward, its extend."""

    fixed: float
    token: float
    knee: int
    beyond: float
    draft: float
    extend: float

    def table(self) -> CostTable:
        tokens = (1, self.knee, 4 * self.knee)
        times = (self.fixed + self.token, self.fixed + self.token * self.knee)
        seconds = (*times, times[1] + self.beyond * 3 * self.knee)
        return CostTable(
            tokens, tuple(t / 1e3 for t in seconds), draft_fixed=self.draft / 1e3, extend_fixed=self.extend / 1e3
        )


# A GPU reads its weights for a few tokens as fast as for a hundred; a CPU pays for each; a draft may be dear.
MACHINES = {
    "GPU": Machine(fixed=10.0, token=0.005, knee=64, beyond=0.15, draft=0.4, extend=0.5),
    "CPU": Machine(fixed=80.0, token=1.4, knee=64, beyond=2.0, draft=4.0, extend=5.0),
    "dear draft": Machine(fixed=5.0, token=1.0, knee=64, beyond=1.0, draft=3.0, extend=3.0),
}


class Simulated:
    """One server with ``users`` requests, each replaced by another after LENGTH tokens.

    fixed: a depth to draft and verify always; None lets the scheduler decide. acceptance: mean chance of a draft token,
    spread over tokens as a draft's own probability shows it.
    """

    def __init__(self, machine: Machine, users: int, fixed: int | None = None, acceptance: float = 0.7) -> None:
        self.scheduler = StepScheduler(slots=users, gamma=GAMMA)
        self.truth = CostModel(machine.table(), max_depth=GAMMA)
        self.scheduler.cost = CostModel(machine.table(), max_depth=GAMMA)
        self.fixed, self.mean = fixed, acceptance
        self.random = np.random.default_rng(users)
        self.generation, self.said = np.zeros(users, np.int64), self.random.integers(0, LENGTH, users)
        self.first = self._chances()[:, 0]

    def step(self) -> tuple[int, float]:
        """Tokens produced and the seconds it took."""
        chances = self._chances()
        chances[:, 0] = self.first
        run = (self.random.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)
        accepted, seconds = self._fixed(run) if self.fixed is not None else self._scheduled(chances, run)
        self.said += accepted + 1
        ended = self.said >= LENGTH
        self.generation += ended
        self.said[ended] = 0
        self.first = self._chances()[:, 0]
        return int(accepted.sum()) + len(accepted), seconds

    def _fixed(self, run: np.ndarray) -> tuple[np.ndarray, float]:
        return np.minimum(run, self.fixed), self._takes(self.fixed, len(run) * (self.fixed + 1))

    def _scheduled(self, chances: np.ndarray, run: np.ndarray) -> tuple[np.ndarray, float]:
        it, users, seconds = self.scheduler, len(run), 0.0
        clean, greedy = np.ones(users, bool), np.zeros(users, np.int64)
        described = StepBatch(np.arange(users), self.generation, greedy, clean, CONTEXT * users)

        def takes(plan: Plan, tokens: int) -> float:
            nonlocal seconds
            seconds = self._takes(plan.depth, tokens)
            if plan.depth == 0 and it.warm:  # the extend that keeps the draft warm
                seconds += self.truth.table.extend_fixed
            return seconds

        _, _, accepted = drive(
            it,
            described,
            _shown(self.first),
            lambda depth: _shown(chances[:, :depth]),
            lambda verified: np.minimum(run, verified),
            takes,
        )
        return accepted, seconds

    def _takes(self, depth: int, tokens: int) -> float:
        users = len(self.said)
        return float(self.truth.step_time(users, depth, [tokens], CONTEXT * users)[0])

    def _chances(self) -> np.ndarray:
        return self.random.beta(4 * self.mean, 4 * (1 - self.mean), (len(self.said), GAMMA))


def throughput(server: Simulated, steps: int = 600) -> float:
    """Tokens a second."""
    tokens, seconds = zip(*(server.step() for _ in range(steps)), strict=True)
    return sum(tokens) / sum(seconds)


def _shown(chance: np.ndarray) -> torch.Tensor:
    """What a draft shows whose best token has this chance and four others share the rest."""
    best = torch.from_numpy(np.clip(chance, 1e-4, 1 - 1e-4))
    rest = ((1 - best) / 4)[..., None].expand(*best.shape, 4)
    logits = torch.cat([best[..., None], rest], -1).log().float()
    return draft_features(logits.flatten(0, -2)).view(*chance.shape, len(FEATURES))
