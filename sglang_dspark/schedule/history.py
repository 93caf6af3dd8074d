"""Keeps recent confidence per request slot and answers with what is old enough to plan a budget from."""

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.survival import Floats

Ints = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).min


class ConfidenceHistory:
    """The last lag + 1 confidence rows of each request slot, stamped with step and generation.

    A generation tells two requests that used one slot apart: a row is only ever returned to the request that wrote it.
    Memory: (lag + 1) * max_slots * (4 * gamma + 16) bytes.
    """

    def __init__(self, max_slots: int, gamma: int, lag: int = 1) -> None:
        if lag < 0:
            raise ValueError(f"The confidence history's lag is a number of steps, 0 or more, not {lag}.")
        self.lag = lag
        self._confidence = np.zeros((max_slots, lag + 1, gamma), np.float32)
        self._step = np.full((max_slots, lag + 1), _NEVER, np.int64)
        self._generation = np.full((max_slots, lag + 1), -1, np.int64)
        self._newest = np.zeros(max_slots, np.int64)

    def record(self, step: int, slots: Ints, generations: Ints, confidence: Floats) -> None:
        """Stores the confidence [R, gamma] drafted in a step for slots [R]; recording a step again replaces it."""
        entry = self._newest[slots]
        entry = np.where(self._step[slots, entry] == step, entry, (entry + 1) % (self.lag + 1))
        self._newest[slots] = entry
        self._step[slots, entry] = step
        self._generation[slots, entry] = generations
        self._confidence[slots, entry] = confidence

    def lookup(self, step: int, slots: Ints, generations: Ints, prior: Floats) -> tuple[Floats, Ints]:
        """The newest confidence at least `lag` steps old of each request, and where it came from.

        slots, generations: [R]. prior: [gamma] or [R, gamma], counted for requests without a row of their own. Returns
        confidence [R, gamma] float32 and remap [R] int64: r where row r is the request's own, -1 where it is the prior.
        """
        usable = (self._step[slots] <= step - self.lag) & (self._generation[slots] == np.asarray(generations)[:, None])
        stamps = np.where(usable, self._step[slots], _NEVER)
        entry = stamps.argmax(axis=1)
        rows = np.arange(len(slots))
        known = stamps[rows, entry] != _NEVER
        confidence = np.where(known[:, None], self._confidence[slots, entry], prior).astype(np.float32, copy=False)
        return confidence, np.where(known, rows, -1)
