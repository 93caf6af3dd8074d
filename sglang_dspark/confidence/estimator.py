"""Confidence without a trained head: the draft's top probability, corrected per position and verify rule by what was accepted."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RULES = ("greedy", "sampled")
# Probabilities are kept this far from 0 and 1 before the logit: about +-9.2, where float32 still resolves 1 - p well.
EDGE = 1e-4


def evaluate(top_prob: Tensor, position: int, rule: Tensor, parameters: Tensor) -> Tensor:
    """Confidence [R] float32 in (0, 1) of draft position `position` (from 0), before its token is sampled.

    top_prob: [R], the draft distribution's largest probability at the position. rule: [R] int64, index into RULES.
    parameters: [2, gamma, 2] float32 of DraftConfidence.parameters, on the same device. Reads nothing back.
    """
    coefficients = parameters[:, position][rule]
    return torch.sigmoid(coefficients[:, 0] + coefficients[:, 1] * torch.logit(top_prob.float(), eps=EDGE))


class DraftConfidence:
    """Online logistic correction a + b * logit(top_prob), one (a, b) for each verify rule and draft position."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self._theta = np.zeros((len(RULES), gamma, 2))
        self._theta[..., 1] = 1.0

    def parameters(self) -> NDArray[np.float32]:
        """[2 rules, gamma, 2] float32: a and b."""
        return self._theta.astype(np.float32)

    def observe(
        self,
        top_prob: NDArray[np.floating],
        rule: NDArray[np.integer],
        accepted: NDArray[np.integer],
        verified: NDArray[np.integer],
        weight_mask: NDArray[np.generic] | None = None,
    ) -> None:
        """Learns from a step. top_prob [R, gamma]; rule, accepted, verified [R]; weight_mask [R], 0 keeps a request out."""
