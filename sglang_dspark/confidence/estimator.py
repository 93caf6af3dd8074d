"""Confidence of each draft token: what its source says, corrected online by what was accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.confidence.online import Doubles, Lean, OnlineLogistic
from sglang_dspark.confidence.source import HEADLESS, RULES, Source

# Half of what was seen of a position is forgotten after this many observations of it.
HALF_LIFE = 2048.0
# Recent acceptance of a request: half forgotten after so many of its verified positions, and drawn to 0 as by eight of
# spread 0.2. On the SmolLM2 draft anything from 16 to 48 positions does as well.
RECENT_HALF_LIFE, RECENT_HOLD = 24.0, 1.6


class Rows(NamedTuple):
    """Whose rows a step has, [R] int64 each."""

    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    """Another request in the same slot has another number."""
    rule: NDArray[np.int64]
    """Index into RULES."""


class RecentAcceptance:
    """How much better each request's drafts fared of late than their source said: in log-odds, 0 for a new request.

    The surplus of accepted positions over its derivative by the log-odds, which is one Newton step to the offset that
    would have predicted them.
    """

    def __init__(self, slots: int) -> None:
        self._generation = np.full(slots, -1, np.int64)
        self._surplus = np.zeros(slots)
        self._spread = np.zeros(slots)

    def of(self, rows: Rows) -> NDArray[np.float32]:
        """[R]"""
        mine = self._generation[rows.slots] == rows.generations
        value = self._surplus[rows.slots] / (self._spread[rows.slots] + RECENT_HOLD)
        return np.where(mine, value, 0.0).astype(np.float32)

    def observe(self, rows: Rows, row: NDArray[np.intp], expected: Doubles, outcome: NDArray[np.bool_]) -> None:
        """n outcomes, of the requests in `row` [n] of the step's, beside the chance that was expected of each."""
        requests = len(rows.slots)
        seen = np.bincount(row, minlength=requests)
        surplus = np.bincount(row, outcome - expected, minlength=requests)
        spread = np.bincount(row, expected * (1 - expected), minlength=requests)
        keep = np.exp2(-seen / RECENT_HALF_LIFE) * (self._generation[rows.slots] == rows.generations)
        self._generation[rows.slots] = rows.generations
        self._surplus[rows.slots] = self._surplus[rows.slots] * keep + surplus
        self._spread[rows.slots] = self._spread[rows.slots] * keep + spread


class Estimator:
    """Owns what was learnt of acceptance: coefficients for each verify rule and position, and requests' recent past.

    Confidence = sigmoid(evidence . coefficients). Without a head the evidence is what the draft shows; with one it is
    the head's logit, and the coefficients are the online correction sigmoid(a + b * logit + c * recent) of it. Memory:
    24 bytes a slot.
    """

    def __init__(
        self, slots: int, gamma: int, source: Source = HEADLESS, temperatures: NDArray[np.float64] | None = None
    ) -> None:
        """temperatures: [rules, gamma] of a calibration fitted to this source; its start is divided by them."""
        self.gamma, self.source = gamma, source
        divisor = np.ones((len(RULES), gamma)) if temperatures is None else temperatures
        self._start = source.start[:, None, :] / divisor[..., None]
        lean = Lean(source.pooled, source.position)
        self._fit = OnlineLogistic(self._start, lean, source.low, source.high, HALF_LIFE)
        self._recent = RecentAcceptance(slots)
        self._parameters = self._fit.theta.astype(np.float32)

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """[rules, gamma, D]"""
        return self._fit.theta

    def recent(self, rows: Rows) -> NDArray[np.float32]:
        """[R] recent acceptance of the step's requests."""
        return self._recent.of(rows)

    def evaluate(self, shown: Tensor, rows: Rows) -> Tensor:
        """Confidence [R, depth] float32 of a step's draft, on the device of ``shown`` [R, depth, features].

        Reads nothing back and waits for nothing; NaN stays NaN, which the allocation counts as 0.
        """
        arrays = self.recent(rows), rows.rule, self._parameters
        recent, rule, parameters = (to_device(array, shown.device) for array in arrays)
        evidence = self.source.evidence(shown, recent, rule)
        parameters = parameters[rule, : shown.shape[1]]
        return torch.linalg.vecdot(evidence, parameters).sigmoid()

    def observe(
        self,
        shown: NDArray[np.float32],
        recent: NDArray[np.float32],
        rows: Rows,
        accepted: NDArray[np.integer],
        verified: NDArray[np.integer],
        clean: NDArray[np.bool_],
    ) -> None:
        """Learns from a step.

        shown: [R, depth, features] and recent: [R], as they were when the step was scheduled. accepted, verified: [R]
        draft tokens, anchor and bonus excluded. clean: [R], False keeps a request out of what all share (grammar,
        penalties, logit bias); its own recent acceptance is kept all the same.
        """
        evidence = self.source.evidence(*(torch.from_numpy(a) for a in (shown, recent, rows.rule))).numpy()
        seen = np.arange(shown.shape[1]) < np.minimum(verified, accepted + 1)[:, None]
        row, position = np.nonzero(seen & np.isfinite(evidence.sum(axis=-1)))
        x, rule, outcome = evidence[row, position].astype(np.float64), rows.rule[row], position < accepted[row]
        self._recent.observe(rows, row, self._expected(x, rule, position), outcome)
        shared = clean[row]
        if shared.any():
            self._fit.learn(x[shared], rule[shared], position[shared], outcome[shared])
            self._parameters = self._fit.theta.astype(np.float32)

    def _expected(self, x: Doubles, rule: NDArray[np.int64], position: NDArray[np.intp]) -> Doubles:
        """[n] what the source alone says: the start's confidence without recent acceptance, which stays what it means
        while the coefficients move."""
        return 1.0 / (1.0 + np.exp(-(x[:, :-1] * self._start[rule, position, :-1]).sum(axis=-1)))


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """In the order of the device's stream; from pinned memory, as a copy from any other would wait for the stream."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
