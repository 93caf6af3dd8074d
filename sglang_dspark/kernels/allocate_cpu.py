"""Allocation for CPU tensors: the same top-B by one selection instead of a sort, in NumPy on the tensors' memory."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Lens = NDArray[np.int32]

# Bit pattern of 1.0; read as unsigned, the patterns of floats in [0, 1] are the ones up to it.
_ONE = np.float32(1).view(np.uint32)


def gather(confidence: Floats, remap: NDArray[np.int64], prior: Floats) -> Floats:
    """Confidence [R, gamma] of each request: its row of confidence [H, gamma], the prior [gamma] where remap is -1."""
    # Row -1 of the table is its last, which is where the prior lies.
    table = np.empty((len(confidence) + 1, confidence.shape[1]), np.float32)
    table[:-1], table[-1] = confidence, prior
    return table.take(remap, 0)


def in_order(remap: NDArray[np.int64], rows: int) -> bool:
    """Whether every request takes its own row, and there are no others: the rule, and then nothing need be gathered."""
    return len(remap) == rows and remap.tobytes() == _identity(rows)


@lru_cache(maxsize=8)
def _identity(rows: int) -> bytes:
    return np.arange(rows).tobytes()


def allocate_cpu(confidence: Floats, budget: int) -> tuple[Lens, Lens]:
    """verify_lens [R] and qo_indptr [R + 1] for the newest confidence [R, depth], as kernels.allocate.allocate."""
    requests, depth = confidence.shape
    indptr = np.empty(requests + 1, np.int32)
    indptr[0] = 0
    if budget <= 0 or depth == 0:
        lens = np.ones(requests, np.int32)
        np.add.accumulate(lens, 0, None, indptr[1:])
        return lens, indptr
    survival = _survival(confidence)
    least = _least(survival, budget)
    chosen = survival >= least if least > 0 else survival > 0
    # One for the anchor, which is always verified. Bytes add up without widening: a row has at most 17 tokens.
    lens = np.add.reduce(chosen.view(np.uint8), 0, np.uint8, None, False, 1).astype(np.int32)
    np.add.accumulate(lens, 0, None, indptr[1:])
    surplus = indptr.item(requests) - requests - budget
    if surplus > 0:
        # Position-major order is the tie rule; the last of the equal ones go.
        last = np.flatnonzero(survival == least)[-surplus:]
        lens -= np.bincount(last % requests, minlength=requests).astype(np.int32)
        np.add.accumulate(lens, 0, None, indptr[1:])
    return lens, indptr


def _survival(confidence: Floats) -> Floats:
    """Survival [depth, R], position-major, multiplied left to right."""
    if np.maximum.reduce(confidence.view(np.uint32), None) > _ONE:
        # Comparisons with NaN are false, so one select handles NaN, negatives and -0.0 together.
        confidence = np.where(confidence > 0, np.minimum(confidence, np.float32(1)), np.float32(0))
    columns = confidence.T.copy()
    before, *rest = columns
    for column in rest:
        np.multiply(column, before, column)
        before = column
    return columns


def _least(survival: Floats, budget: int) -> np.float32:
    """The budget-th largest survival, 0 where there are not so many."""
    if budget >= survival.size:
        return np.float32(0)
    ordered = survival.flatten()
    ordered.partition(ordered.size - budget)
    return ordered[-budget]
