"""How good probabilities are: calibration error, Brier score, area under the ROC curve, and reliability curves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

BINS = 10  # of equal width; more would measure the noise of bins, at the few hundred samples of a deep position


class Reliability(NamedTuple):
    """What was said and what happened, for each bin of probabilities: [bins] each, 0 where a bin is empty."""

    samples: Doubles
    confidence: Doubles
    """Mean probability."""
    outcome: Doubles
    """Share that came true."""


def reliability(
    confidence: NDArray[np.floating],
    outcome: NDArray[np.generic],
    bins: int = BINS,
    weight: NDArray[np.floating] | None = None,
) -> Reliability:
    """confidence: [n] in [0, 1]. outcome: [n] bool, or the chance in [0, 1] that it comes true. weight: [n], 1 each."""
    at = np.minimum((np.asarray(confidence) * bins).astype(np.intp), bins - 1)
    weight = np.ones(len(at)) if weight is None else weight
    count = np.bincount(at, weight, minlength=bins).astype(np.float64, copy=False)
    filled = np.where(count > 0, count, 1.0)
    said = np.bincount(at, confidence * weight, minlength=bins) / filled
    happened = np.bincount(at, np.asarray(outcome, np.float64) * weight, minlength=bins) / filled
    return Reliability(count, said, happened)


def calibration_error(
    confidence: NDArray[np.floating],
    outcome: NDArray[np.generic],
    bins: int = BINS,
    weight: NDArray[np.floating] | None = None,
) -> float:
    """Expected calibration error: |mean probability - share that came true|, bins weighted by count; NaN for n = 0.

    Arguments as reliability. Never 0 on a finite sample: a perfect predictor of n outcomes in b filled bins shows about
    0.36 sqrt(b / n).
    """
    if not len(confidence):
        return float("nan")
    r = reliability(confidence, outcome, bins, weight)
    return float((r.samples * np.abs(r.confidence - r.outcome)).sum() / r.samples.sum())


def brier(confidence: NDArray[np.floating], outcome: NDArray[np.generic]) -> float:
    """Mean squared error of the probabilities; NaN for n = 0."""
    return float(np.mean(np.square(confidence - np.asarray(outcome, np.float64)))) if len(confidence) else float("nan")


def auc(
    confidence: NDArray[np.floating], outcome: NDArray[np.generic], weight: NDArray[np.floating] | None = None
) -> float:
    """Chance that one that came true was given more than one that did not, ties by half; NaN where all are alike.

    Arguments as reliability; a chance counts as both, by shares.
    """
    truth = np.asarray(outcome, np.float64)
    weight = np.ones(len(truth)) if weight is None else weight
    _, group = np.unique(confidence, return_inverse=True)
    true, false = np.bincount(group, truth * weight), np.bincount(group, (1 - truth) * weight)
    if not true.sum() * false.sum():
        return float("nan")
    below = np.cumsum(false) - false
    return float((true * (below + false / 2)).sum() / (true.sum() * false.sum()))
