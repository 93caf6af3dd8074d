"""Confidence without a trained head: the draft's top probability, corrected per position by what was accepted."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Doubles = NDArray[np.float64]

# How a request's tokens are verified decides what is accepted, so each rule is corrected on its own.
RULES = ("greedy", "sampled")
# Probabilities are kept this far from 0 and 1 before the logit: about +-9.2, where float32 still resolves 1 - p well.
EDGE = 1e-4
# Half of what was seen is forgotten after this many observations of a position: about 3,000 count at any time, which
# leaves the estimate with a standard error near 0.01 and follows a change of domain within seconds at 64 users.
HALF_LIFE = 2048.0
# Where nothing was seen: the draft's own probability (a = 0, b = 1), held as firmly as about twenty observations would.
_START = np.array([0.0, 1.0])
_HOLD = np.diag([4.0, 8.0])
# a shifts the odds by at most e^6, b never turns the order of probabilities round.
_LOWEST, _HIGHEST = np.array([-6.0, 0.0]), np.array([6.0, 4.0])


def evaluate(top_prob: Tensor, position: int, rule: Tensor, parameters: Tensor) -> Tensor:
    """Confidence [R] float32 in (0, 1) of draft position `position` (from 0), before its token is sampled.

    top_prob: [R], the draft distribution's largest probability at the position. rule: [R] int64, index into RULES.
    parameters: [2, gamma, 2] float32 of DraftConfidence.parameters, on the same device. Reads nothing back; NaN stays
    NaN, which the allocation counts as 0.
    """
    coefficients = parameters[:, position][rule]
    return torch.sigmoid(coefficients[:, 0] + coefficients[:, 1] * torch.logit(top_prob.float(), eps=EDGE))


class DraftConfidence:
    """Online logistic correction sigmoid(a + b * logit(top_prob)), an (a, b) for each verify rule and draft position.

    Each (a, b) is a running Gaussian posterior: one Newton step a batch, with a precision gathered from what was seen
    and forgotten exponentially. It leans on the fit pooled over positions, which leans on the draft's own probability:
    a position that was never verified inherits what the others showed. Only reached and verified positions are learnt
    from, so a schedule that looks at the same probability does not bias the fit.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        # Row gamma of each rule is the fit pooled over positions.
        self._theta = np.tile(_START, (len(RULES), gamma + 1, 1))
        self._precision = np.tile(_HOLD, (len(RULES), gamma + 1, 1, 1))

    def parameters(self) -> NDArray[np.float32]:
        """[2 rules, gamma, 2] float32: a and b."""
        return self._theta[:, : self.gamma].astype(np.float32)

    def observe(
        self,
        top_prob: NDArray[np.floating],
        rule: NDArray[np.integer],
        accepted: NDArray[np.integer],
        verified: NDArray[np.integer],
        weight_mask: NDArray[np.generic] | None = None,
    ) -> None:
        """Learns from a step.

        top_prob: [R, gamma], positions not drafted may hold anything. rule: [R], index into RULES. accepted, verified:
        [R] draft tokens, anchor and bonus excluded. weight_mask: [R], 0 keeps a request out (grammar, penalties, bias).
        """
        position = np.arange(1, self.gamma + 1)
        seen = position <= np.minimum(verified, np.asarray(accepted) + 1)[:, None]
        seen &= np.isfinite(top_prob)
        if weight_mask is not None:
            seen &= (np.asarray(weight_mask) > 0)[:, None]
        bounded = np.clip(np.where(seen, top_prob, 0.5), EDGE, 1 - EDGE).astype(np.float64)
        logit = np.log(bounded / (1 - bounded))
        label = (position <= np.asarray(accepted)[:, None]).astype(np.float64)
        for index in range(len(RULES)):
            here = seen & (np.asarray(rule) == index)[:, None]
            if here.any():
                self._step(index, logit, label, here.astype(np.float64))

    def _step(self, rule: int, logit: Doubles, label: Doubles, weight: Doubles) -> None:
        """One Newton step of a rule's fits; logit, label, weight: [R, gamma]."""
        gamma = self.gamma
        # The pooled fit first, on its own parameters, then every position towards it.
        before = self._theta[rule, gamma].copy()
        sums = _sums(logit, label, weight, before[None])
        self._update(rule, slice(gamma, None), [part.sum(0, keepdims=True) for part in sums], _START, np.zeros(2))
        centre = self._theta[rule, gamma]
        sums = _sums(logit, label, weight, self._theta[rule, :gamma])
        self._update(rule, slice(0, gamma), sums, centre, centre - before)

    def _update(self, rule: int, rows: slice, sums: Sequence[Doubles], centre: Doubles, shift: Doubles) -> None:
        """Posterior after a batch; centre: what the rows lean on, shift: how far that has just moved, both [2]."""
        gradient, curvature, count = sums
        keep = np.exp(-np.log(2.0) / HALF_LIFE * count)[:, None]
        theta, precision = self._theta[rule, rows], self._precision[rule, rows]
        precision = keep[..., None] * precision + (1 - keep[..., None]) * _HOLD + curvature
        # The hold is part of every precision. It carries a row along with its centre, fully where nothing was seen, and
        # takes over what is forgotten.
        pull = ((1 - keep) * (centre - theta) + shift) @ _HOLD
        move = np.linalg.solve(precision, (gradient + pull)[..., None])[..., 0]
        # A batch far from the fit may overshoot; beyond a step of 1 the curvature found here no longer holds.
        self._theta[rule, rows] = np.clip(theta + np.clip(move, -1.0, 1.0), _LOWEST, _HIGHEST)
        self._precision[rule, rows] = precision


def _sums(logit: Doubles, label: Doubles, weight: Doubles, theta: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """Log likelihood at theta [gamma or 1, 2]: gradient [gamma, 2], curvature [gamma, 2, 2], observations [gamma]."""
    probability = 1.0 / (1.0 + np.exp(-(theta[:, 0] + theta[:, 1] * logit)))
    error = weight * (label - probability)
    spread = weight * probability * (1 - probability)
    gradient = np.stack([error.sum(0), (error * logit).sum(0)], axis=-1)
    cross, square = (spread * logit).sum(0), (spread * logit * logit).sum(0)
    curvature = np.stack([np.stack([spread.sum(0), cross], -1), np.stack([cross, square], -1)], -2)
    return gradient, curvature, weight.sum(0)
