"""Allocation for CPU tensors: the same top-B by one selection instead of a sort, in NumPy on the tensors' memory."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Lens = NDArray[np.int32]

# Bit pattern of 1.0; read as unsigned, the patterns of floats in [0, 1] are the ones up to it.
_ONE = np.float32(1).view(np.uint32)


def allocate_cpu(
    confidence: Floats, remap: NDArray[np.int64], prior: Floats, budget: int, depth: int
) -> tuple[Lens, Lens]:
    """verify_lens [R] and qo_indptr [R + 1]; arguments as sglang_dspark.kernels.allocate.allocate."""
    requests = len(remap)
    # Row 0 is the anchor, always verified.
    verified = np.empty((depth + 1, requests), np.bool_)
    verified[0] = True
    if budget > 0 and depth:
        _choose(_survival(confidence, remap, prior, depth), budget, verified[1:])
    else:
        verified[1:] = False
    indptr = np.empty(requests + 1, np.int32)
    indptr[0] = 0
    # Bytes add up without widening: a row has at most 17 tokens.
    lens = np.add.reduce(verified.view(np.uint8), 0, np.uint8).astype(np.int32)
    np.add.accumulate(lens, 0, np.int32, indptr[1:])
    return lens, indptr


def _survival(confidence: Floats, remap: NDArray[np.int64], prior: Floats, depth: int) -> Floats:
    """Survival [depth, R], position-major, multiplied left to right."""
    # Row -1 of the table is its last, which is where the prior lies.
    table = np.empty((len(confidence) + 1, depth), np.float32)
    table[:-1], table[-1] = confidence[:, :depth], prior[:depth]
    if np.maximum.reduce(table.view(np.uint32), None) > _ONE:
        # Comparisons with NaN are false, so one select handles NaN, negatives and -0.0 together.
        table = np.where(table > 0, np.minimum(table, np.float32(1)), np.float32(0))
    columns = table.take(remap, 0).T.copy()
    for before, column in pairwise(columns):
        np.multiply(column, before, column)
    return columns


def _choose(survival: Floats, budget: int, chosen: NDArray[np.bool_]) -> None:
    """Marks the top `budget` of survival [depth, R] in chosen, of the same shape."""
    ordered = survival.flatten()
    least = np.float32(0)
    if budget < ordered.size:
        ordered.partition(ordered.size - budget)
        least = ordered[-budget]
    if least == 0:
        np.greater(survival, 0, chosen)
        return
    np.greater_equal(survival, least, chosen)
    surplus = np.count_nonzero(chosen) - budget
    if surplus:
        # Position-major order is the tie rule; the last of the equal ones go.
        ties = np.flatnonzero(survival == least)
        chosen.ravel()[ties[-surplus:]] = False
