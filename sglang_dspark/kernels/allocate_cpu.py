"""Allocation for CPU tensors: the same top-B by one selection instead of a sort, in NumPy on the tensors' memory."""

from functools import lru_cache
from threading import get_ident

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


class _Scratch:
    """Arrays of one shape and their views. At 256 x 7 making them anew takes a third of an allocation's time."""

    def __init__(self, requests: int, depth: int) -> None:
        self.survival = np.empty((depth, requests), np.float32)
        self.flat = self.survival.reshape(-1)
        self.bits = self.flat.view(np.uint32)
        self.pairs = list(zip(self.survival, self.survival[1:], strict=False))
        """Of each position and the next."""
        self.ordered = np.empty_like(self.flat)
        self.chosen = np.empty(self.survival.shape, np.bool_)
        self.chosen_bytes = self.chosen.view(np.uint8)
        self.count = np.empty(requests, np.uint8)


@lru_cache(maxsize=32)
def _scratch(requests: int, depth: int, thread: int) -> _Scratch:
    """One a thread, as two may allocate at once. At most 32, of 9 bytes a candidate."""
    return _Scratch(requests, depth)


def allocate_cpu(confidence: Floats, budget: int) -> tuple[Lens, Lens]:
    """verify_lens [R] and qo_indptr [R + 1] for the newest confidence [R, depth], as kernels.allocate.allocate."""
    requests, depth = confidence.shape
    indptr = np.empty(requests + 1, np.int32)
    indptr[0] = 0
    if budget <= 0 or depth == 0 or requests == 0:
        lens = np.ones(requests, np.int32)
        np.add.accumulate(lens, 0, None, indptr[1:])
        return lens, indptr
    scratch = _scratch(requests, depth, get_ident())
    _multiply(confidence, scratch)
    least = _least(scratch, budget)
    if least > 0:
        np.greater_equal(scratch.survival, least, scratch.chosen)
    else:
        np.greater(scratch.survival, 0, scratch.chosen)
    # One for the anchor, which is always verified. Bytes add up without widening: a row has at most 17 tokens.
    lens = np.add.reduce(scratch.chosen_bytes, 0, np.uint8, scratch.count, False, 1).astype(np.int32)
    np.add.accumulate(lens, 0, None, indptr[1:])
    surplus = indptr.item(requests) - requests - budget
    if surplus > 0:
        # Position-major order is the tie rule; the last of the equal ones go.
        last = np.flatnonzero(scratch.flat == least)[-surplus:]
        lens -= np.bincount(last % requests, minlength=requests).astype(np.int32)
        np.add.accumulate(lens, 0, None, indptr[1:])
    return lens, indptr


def _multiply(confidence: Floats, scratch: _Scratch) -> None:
    """Survival [depth, R] into the scratch, position-major, multiplied left to right."""
    survival, bits = scratch.survival, scratch.bits
    np.copyto(survival, confidence.T)
    if bits[bits.argmax()] > _ONE:
        # Comparisons with NaN are false, so one select handles NaN, negatives and -0.0 together.
        np.copyto(survival, np.where(survival > 0, np.minimum(survival, np.float32(1)), np.float32(0)))
    for before, here in scratch.pairs:
        np.multiply(before, here, here)


def _least(scratch: _Scratch, budget: int) -> np.float32:
    """The budget-th largest survival, 0 where there are not so many."""
    ordered = scratch.ordered
    if budget >= ordered.size:
        return np.float32(0)
    ordered[:] = scratch.flat
    ordered.partition(ordered.size - budget)
    return ordered[-budget]
