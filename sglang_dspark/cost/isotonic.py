"""Non-decreasing fit with least absolute deviations: pools adjacent violators by median, so outliers move nothing."""

import numpy as np
from numpy.typing import NDArray


def lower_median(values: NDArray[np.float64]) -> float:
    """The middle value; of two middle ones the lower, since what disturbs a timing makes it longer."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def isotonic_median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-decreasing float64 [n] with least sum of absolute deviations from values [n].

    By median, not by mean: a value ten times too high takes the level of its successors instead of raising them.
    """
    blocks: list[tuple[float, int, int]] = []  # level, first, past the last
    for end, value in enumerate(values, start=1):
        level, first = float(value), end - 1
        while blocks and blocks[-1][0] > level:
            first = blocks.pop()[1]
            level = lower_median(values[first:end])
        blocks.append((level, first, end))
    return np.concatenate([np.full(end - first, level) for level, first, end in blocks]) if blocks else np.zeros(0)
