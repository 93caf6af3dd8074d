"""Survival of draft positions: the probability that a position and all before it are accepted."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Among the bit patterns of float32, read as unsigned, those of [0, 1] are the lowest: everything else compares above.
_ONE = np.float32(1).view(np.uint32)


def sanitise(confidence: Floats) -> Floats:
    """Maps any float to a usable probability: NaN and negatives to 0, above 1 (and +Inf) to 1.

    confidence: any shape. Returns float32 of the same shape, without negative zeros; the input itself if it is clean.
    """
    confidence = np.asarray(confidence, np.float32)
    if confidence.size == 0 or np.maximum.reduce(confidence.view(np.uint32), axis=None) <= _ONE:
        return confidence
    # Comparisons with NaN are false, so one select handles NaN, negatives and -0.0 together.
    return np.where(confidence > 0, np.minimum(confidence, np.float32(1)), np.float32(0))


def survival(confidence: Floats) -> Floats:
    """Cumulative product of the sanitised confidence along the positions, float32, left to right.

    confidence: [R, gamma]. Returns [R, gamma], non-increasing along a row: rounding is monotone and every factor at
    most 1. The allocation kernel multiplies in the same order, so both agree to the bit. Stored position-major (the
    transpose is contiguous), which makes a shallower draft's survivals one contiguous block.
    """
    columns = sanitise(confidence).T.copy()
    for before, column in pairwise(columns):
        np.multiply(column, before, column)
    return columns.T
