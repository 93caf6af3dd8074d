"""Survival of draft positions: the probability that a position and all before it are accepted (design: cumulative product)."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def sanitise(confidence: Floats) -> Floats:
    """Maps any float to a usable probability: NaN and negatives to 0, above 1 (and +Inf) to 1.

    confidence: any shape. Returns float32 of the same shape, without negative zeros.
    """
    # Comparisons with NaN are false, so one select handles NaN, negatives and -0.0 together.
    return np.where(confidence > 0, np.minimum(confidence, np.float32(1)), np.float32(0)).astype(np.float32, copy=False)


def survival(confidence: Floats) -> Floats:
    """Cumulative product of the sanitised confidence along the last axis, float32, left to right.

    confidence: [R, gamma]. Returns [R, gamma], non-increasing along a row: rounding is monotone, and left to right each
    factor is at most 1. The allocation kernel multiplies in the same order, so both agree to the bit.
    """
    return np.multiply.accumulate(sanitise(confidence), axis=-1, dtype=np.float32)
