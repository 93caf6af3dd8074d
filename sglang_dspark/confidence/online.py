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
WINDOW, SURPRISE = 256.0, 3.5


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
        """start: [rules, gamma, D]. low, high: [D] bounds of a coefficient."""
        self.theta = start.copy()
        self._start = start
        self._pooled, self._position = np.diag(lean.pooled / 4), np.diag(lean.position / 4)
        self._low, self._high = low - start, high - start
        self._half_life = half_life
        self._deviation = np.zeros_like(start)
        self._curvature = np.zeros((*start.shape, start.shape[-1]))
        self._information = np.zeros_like(start)
        self._error, self._variance = np.zeros(len(start)), np.zeros(len(start))

    def learn(
        self, x: NDArray[np.floating], rule: NDArray[np.integer], seen: NDArray[np.bool_], accepted: NDArray[np.bool_]
    ) -> None:
        """x: [R, depth, D], depth up to gamma, finite where seen. rule: [R]. seen, accepted: [R, depth]."""
        rules, depth = len(self.theta), x.shape[1]
        of_rule = rule == np.arange(rules)[:, None]
        # [depth, R, D]: a batch of regressions for matmul. What was not seen is 0, so that its weight of 0 makes it 0.
        x = np.where(seen[..., None], x, 0.0).transpose(1, 0, 2)
        eta = (x * self.theta[rule, :depth].transpose(1, 0, 2)).sum(axis=-1)
        probability = 1.0 / (1.0 + np.exp(-eta))
        mask = of_rule[:, None, :] & seen.T
        spread = np.maximum(probability * (1 - probability), LEAST_SPREAD) * mask
        error = (accepted.T - probability) * mask
        curvature = (x.transpose(0, 2, 1) * spread[:, :, None, :]) @ x
        gradient = (error[:, :, None, :] @ x)[:, :, 0]
        count = mask.sum(axis=-1)
        keep = self._calm(error.sum(axis=(1, 2)), spread.sum(axis=(1, 2)), count.sum(axis=1))[:, None]
        keep = keep * np.exp2(-count / self._half_life)
        self._information[:, :depth] *= keep[..., None]
        self._information[:, :depth] += (curvature @ self._deviation[:, :depth, :, None])[..., 0] + gradient
        self._curvature[:, :depth] *= keep[..., None, None]
        self._curvature[:, :depth] += curvature
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
