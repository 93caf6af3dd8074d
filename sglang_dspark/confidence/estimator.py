"""Confidence without a trained head: the draft's top probability, corrected per position by what was accepted."""

from typing import NamedTuple

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
_HOLD = np.array([4.0, 0.0, 8.0])  # precision of a, of a with b, of b
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
        rules = len(RULES)
        self._pooled = _Fit(np.tile(_START, (rules, 1)), np.tile(_HOLD, (rules, 1)))
        self._positions = _Fit(np.tile(_START, (rules * gamma, 1)), np.tile(_HOLD, (rules * gamma, 1)))

    def parameters(self) -> NDArray[np.float32]:
        """[2 rules, gamma, 2] float32: a and b."""
        return self._positions.theta.reshape(len(RULES), self.gamma, 2).astype(np.float32)

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
        rule, accepted = np.asarray(rule), np.asarray(accepted)
        seen = np.arange(self.gamma) < np.minimum(verified, accepted + 1)[:, None]
        seen &= np.isfinite(top_prob)
        if weight_mask is not None:
            seen &= (np.asarray(weight_mask) > 0)[:, None]
        row, position = np.nonzero(seen)
        if not len(row):
            return
        bounded = np.minimum(np.maximum(top_prob[row, position], EDGE), 1 - EDGE).astype(np.float64)
        logit = np.log(bounded / (1 - bounded))
        label = position < accepted[row]
        before = self._pooled.theta
        self._pooled = _learn(self._pooled, rule[row], logit, label, _START[None], np.zeros((1, 2)))
        centre = self._pooled.theta.repeat(self.gamma, axis=0)
        shift = (self._pooled.theta - before).repeat(self.gamma, axis=0)
        group = rule[row] * self.gamma + position
        self._positions = _learn(self._positions, group, logit, label, centre, shift)


class _Fit(NamedTuple):
    """Posterior of m independent fits."""

    theta: Doubles  # [m, 2] a and b
    precision: Doubles  # [m, 3] of a, of a with b, of b


def _learn(
    fit: _Fit, group: NDArray[np.integer], logit: Doubles, label: NDArray[np.bool_], centre: Doubles, shift: Doubles
) -> _Fit:
    """The fits after a batch of observations [n], each counted for the fit in group [n].

    centre: [m, 2] what each fit leans on; shift: [m, 2] how far that has moved since the last batch.
    """
    size = len(fit.theta)

    def total(values: Doubles | None) -> Doubles:
        return np.bincount(group, values, minlength=size).astype(np.float64, copy=False)

    a, b = fit.theta.T
    probability = 1.0 / (1.0 + np.exp(-(a[group] + b[group] * logit)))
    error, spread = label - probability, probability * (1 - probability)
    forget = 1 - np.exp(-np.log(2.0) / HALF_LIFE * total(None))[:, None]
    spread_logit = spread * logit
    curvature = np.stack([total(spread), total(spread_logit), total(spread_logit * logit)], axis=1)
    precision = fit.precision + forget * (_HOLD - fit.precision) + curvature
    # The hold is part of every precision: it carries a fit along with its centre, fully where nothing was seen, and
    # takes over what is forgotten.
    pull = (forget * (centre - fit.theta) + shift) * _HOLD[[0, 2]]
    gain_a, gain_b = total(error) + pull[:, 0], total(error * logit) + pull[:, 1]
    aa, ab, bb = precision.T
    move = np.stack([bb * gain_a - ab * gain_b, aa * gain_b - ab * gain_a], axis=1) / (aa * bb - ab * ab)[:, None]
    # A batch far from the fit may overshoot; beyond a step of 1 the curvature found here no longer holds.
    theta = np.clip(fit.theta + np.clip(move, -1.0, 1.0), _LOWEST, _HIGHEST)
    return _Fit(theta, precision)
