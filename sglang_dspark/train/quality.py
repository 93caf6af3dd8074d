"""How good confidences are: area under the ROC curve and expected calibration error, for soft and weighted outcomes."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 10


def auc(score: Tensor, truth: Tensor, weight: Tensor) -> float:
    """Chance that an accepted example scores above a rejected one, ties half; truth in [0, 1] counts as both by shares.

    All [n]. NaN when there are only accepted or only rejected ones.
    """
    order = score.argsort()
    score = score[order]
    accepted = (truth * weight)[order].double()
    rejected = ((1 - truth) * weight)[order].double()
    _, group = score.unique_consecutive(return_inverse=True)
    groups = int(group[-1]) + 1
    up = torch.zeros(groups, dtype=torch.double).index_add(0, group, accepted)
    down = torch.zeros(groups, dtype=torch.double).index_add(0, group, rejected)
    below = down.cumsum(0) - down
    return float((up * (below + down / 2)).sum() / (up.sum() * down.sum()))


def calibration_error(probability: Tensor, truth: Tensor, weight: Tensor) -> float:
    """Expected calibration error over BINS bins of equal width, [n] each: mean |confidence - outcome|, by weight."""
    bin_of = (probability * BINS).long().clamp(0, BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.double).index_add(0, bin_of, ((probability - truth) * weight).double())
    return float(gap.abs().sum() / weight.double().sum())
