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


def reliability(confidence: NDArray[np.floating], outcome: NDArray[np.generic], bins: int = BINS) -> Reliability:
    """confidence: [n] in [0, 1]. outcome: [n] bool or 0 and 1."""
    at = np.minimum((np.asarray(confidence) * bins).astype(np.intp), bins - 1)
    count = np.bincount(at, minlength=bins).astype(np.float64)
    filled = np.maximum(count, 1.0)
    said = np.bincount(at, confidence, minlength=bins) / filled
    happened = np.bincount(at, outcome, minlength=bins) / filled
    return Reliability(count, said, happened)


def calibration_error(confidence: NDArray[np.floating], outcome: NDArray[np.generic], bins: int = BINS) -> float:
    """Expected calibration error: |mean probability - share that came true|, bins weighted by count; NaN for n = 0.

    Never 0 on a finite sample: a perfect predictor of n outcomes in b filled bins shows about 0.36 sqrt(b / n).
    """
    if not len(confidence):
        return float("nan")
    r = reliability(confidence, outcome, bins)
    return float((r.samples * np.abs(r.confidence - r.outcome)).sum() / len(confidence))


def brier(confidence: NDArray[np.floating], outcome: NDArray[np.generic]) -> float:
    """Mean squared error of the probabilities; NaN for n = 0."""
    return float(np.mean(np.square(confidence - np.asarray(outcome, np.float64)))) if len(confidence) else float("nan")


def auc(confidence: NDArray[np.floating], outcome: NDArray[np.generic]) -> float:
    """Chance that one that came true was given more than one that did not, ties by half; NaN where all are alike."""
    from scipy.stats import rankdata

    true = np.asarray(outcome, bool)
    positive, negative = int(true.sum()), int((~true).sum())
    if not positive or not negative:
        return float("nan")
    wins = rankdata(confidence)[true].sum() - positive * (positive + 1) / 2
    return float(wins / (positive * negative))
