"""Online logistic regression of acceptance, one for each verify rule and draft position, leaning on one another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

# Observations weigh at least this much in the curvature, the spread of a probability of 0.02 or 0.98: what is all but
# certain and comes out otherwise would else throw a fit far. Where a fit settles does not depend on it.
LEAST_SPREAD = 0.02
# A change of traffic: the errors of about the last WINDOW observations, half-life, sum to more than this many standard
# deviations.
WINDOW, SURPRISE = 256.0, 3.0
SOLVE_EVERY = 16  # observations; a solve takes as long after one as after a thousand


class Lean(NamedTuple):
    """How firmly a coefficient is held, in observations of spread 1/4 that would weigh as much. [D] each."""

    pooled: Doubles
    """All positions together, to the start."""
    position: Doubles
    """One position, to all of them together."""


class OnlineLogistic:
    """P(accepted) = sigmoid(x . theta[rule, position]), theta the mode of a hierarchical Gaussian posterior.

    theta of a position = its start + a deviation; deviations lean on a pooled one, which leans on 0: a position that
    was never verified inherits what the others showed. What was seen is kept as curvature and gradient (one Newton step
    a batch); of a position half is forgotten after ``half_life`` observations, and half of everything at once when the
    last few hundred outcomes are further from what was predicted than chance explains: the traffic has changed.

    Only reached and verified positions may be given. As long as what decides the schedule is known before the outcome,
    what was left out then does not bias the fit.
    """

    def __init__(self, start: Doubles, lean: Lean, low: Doubles, high: Doubles, half_life: float) -> None:
        """start: [rules, gamma, D]. low, high: [D] bounds of a coefficient; a start beyond them is its own bound."""
        self.theta = start.copy()
        self._start = start
        self._pooled, self._position = np.diag(lean.pooled / 4), np.diag(lean.position / 4)
        self._low, self._high = np.minimum(low - start, 0.0), np.maximum(high - start, 0.0)
        self._half_life = half_life
        self._deviation = np.zeros_like(start)
        self._curvature = np.zeros((*start.shape, start.shape[-1]))
        self._information = np.zeros_like(start)
        self._unsolved = 0
        self._error, self._variance = np.zeros(len(start)), np.zeros(len(start))

    def learn(
        self, x: Doubles, rule: NDArray[np.integer], position: NDArray[np.integer], accepted: NDArray[np.bool_]
    ) -> None:
        """n observations: x [n, D], its first element 1; rule, position (from 0) and accepted [n]."""
        rules, gamma, size = self.theta.shape
        group = rule * gamma + position
        probability = 1.0 / (1.0 + np.exp(-np.einsum("nd,nd->n", x, self.theta.reshape(-1, size)[group])))
        spread = np.maximum(probability * (1 - probability), LEAST_SPREAD)
        error = accepted - probability
        member = (np.arange(rules * gamma)[:, None] == group).astype(np.float64)  # sums over groups are matmuls
        square = (x[:, :, None] * x[:, None, :]).reshape(-1, size * size)
        curvature = ((member * spread) @ square).reshape(rules, gamma, size, size)
        gradient = ((member * error) @ x).reshape(rules, gamma, size)
        count = member.sum(axis=1).reshape(rules, gamma)
        # The first evidence is 1, so these are the sums of errors and of spreads.
        keep = self._calm(gradient[..., 0].sum(axis=1), curvature[..., 0, 0].sum(axis=1), count.sum(axis=1))
        keep = keep[:, None] * np.exp2(-count / self._half_life)
        self._information *= keep[..., None]
        self._information += np.einsum("rkij,rkj->rki", curvature, self._deviation) + gradient
        self._curvature *= keep[..., None, None]
        self._curvature += curvature
        self._unsolved += len(x)
        if self._unsolved >= SOLVE_EVERY:
            self._unsolved = 0
            self._solve()

    def _calm(self, error: Doubles, spread: Doubles, count: Doubles) -> Doubles:
        """[rules] share of the past to keep: 1, or a half where the recent errors add up to more than chance."""
        keep = np.exp2(-count / WINDOW)
        self._error = self._error * keep + error
        self._variance = self._variance * keep**2 + spread
        changed = np.square(self._error) > SURPRISE**2 * np.maximum(self._variance, 1.0)
        self._error[changed] = 0.0
        return np.where(changed, 0.5, 1.0)

    def _solve(self) -> None:
        """The posterior mode: the positions' deviations given the pooled one, which is eliminated first (Schur)."""
        own = np.linalg.inv(self._curvature + self._position)
        pull = self._position @ own
        system = self._pooled + (self._position - pull @ self._position).sum(axis=1)
        pooled = np.linalg.solve(system, (pull @ self._information[..., None]).sum(axis=1))
        held = (self._position @ pooled)[:, None]
        deviation = (own @ (self._information[..., None] + held))[..., 0]
        # A batch far from the fit may overshoot; beyond a step of 1 the curvature found here no longer holds.
        deviation = np.clip(deviation, self._deviation - 1.0, self._deviation + 1.0)
        self._deviation = np.clip(deviation, self._low, self._high)
        self.theta = self._start + self._deviation
