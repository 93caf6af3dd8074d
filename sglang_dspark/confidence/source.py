"""Where confidence comes from: what is known of a position before its token is drawn, as evidence for a logistic model.

This is the one place that differs between a draft with a trained head and one without. A source names what the engine
keeps of each position (``shown``), makes evidence of it, and says where its coefficients start and how firmly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.confidence.features import FEATURES

Doubles = NDArray[np.float64]

# How a request's tokens are verified decides what is accepted, so each rule is fitted on its own.
RULES = ("greedy", "sampled")
# Logits are cut here, at probabilities of 1e-4 and 1 - 1e-4: float32 resolves 1 - p no better, and one infinite logit
# must not outweigh everything else.
MOST = 9.2
MOST_RECENT = 3.0  # a few surprises of an all but certain draft must not decide for the next hundred tokens


class Source(NamedTuple):
    """One way to tell how likely a draft token is to be accepted."""

    name: str
    shown: tuple[str, ...]
    """What is kept of each position."""
    evidence: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(shown [R, depth, len(shown)], recent [R], rule [R] int64) to [R, depth, D]: a 1 first, recent last. NaN where
    shown is NaN."""
    start: Doubles
    """[rules, D] coefficients before anything was seen, the same for each position."""
    pooled: Doubles
    position: Doubles
    """[D] how firmly coefficients are held, see online.Lean. On a trace of the SmolLM2 draft a third of these numbers,
    or the threefold, changes the Brier score by less than 0.0002."""
    low: Doubles
    high: Doubles
    """[D] bounds of the coefficients."""

    def logits(
        self, shown: NDArray[np.float32], recent: NDArray[np.float32], rule: NDArray[np.integer]
    ) -> NDArray[np.float64]:
        """[R, depth] what the source says before anything was learnt; NaN where ``shown`` is."""
        rules = torch.from_numpy(rule.astype(np.int64))
        evidence = self.evidence(torch.from_numpy(shown), torch.from_numpy(recent), rules).numpy()
        return np.asarray((evidence * self.start[rule][:, None]).sum(axis=-1), np.float64)


def _of_features(shown: Tensor, recent: Tensor, rule: Tensor) -> Tensor:
    """What is shown is the evidence."""
    return _with_recent(shown.clamp(-MOST, MOST), recent)


def _of_head(shown: Tensor, recent: Tensor, rule: Tensor) -> Tensor:
    logit = shown[torch.arange(len(rule), device=rule.device), :, len(FEATURES) + rule]
    return _with_recent(logit.clamp(-MOST, MOST)[..., None], recent)


def _with_recent(evidence: Tensor, recent: Tensor) -> Tensor:
    """[R, depth, E] between the constant and the requests' recent acceptance."""
    rows, depth, _ = evidence.shape
    recent = recent.clamp(-MOST_RECENT, MOST_RECENT)
    return torch.cat([evidence.new_ones(rows, depth, 1), evidence, recent[:, None, None].expand(-1, depth, 1)], dim=-1)


HEADLESS = Source(
    name="draft",
    shown=FEATURES,
    evidence=_of_features,
    # The draft's own probability, shifted by recent acceptance: what a fit to 10,518 greedy and 2,953 sampled positions
    # of the SmolLM2 draft gave recent acceptance. Its other coefficients are that draft's own, and left to be learnt.
    start=np.array([[0.0, 1.0, 0.0, 0.0, 0.8], [0.0, 1.0, 0.0, 0.0, 0.25]]),
    pooled=np.array([20.0, 40.0, 40.0, 40.0, 20.0]),
    position=np.array([160.0, 320.0, 320.0, 320.0, 320.0]),
    low=np.array([-6.0, 0.0, -2.0, -2.0, -1.0]),
    high=np.array([6.0, 3.0, 2.0, 2.0, 3.0]),
)
HEAD = Source(
    name="head",
    shown=(*FEATURES, *RULES),  # the head's logit for each rule behind what it read
    evidence=_of_head,
    start=np.array([[0.0, 1.0, 0.8], [0.0, 1.0, 0.25]]),
    pooled=np.array([20.0, 40.0, 20.0]),
    position=np.array([160.0, 320.0, 320.0]),
    low=np.array([-6.0, 0.0, -1.0]),
    high=np.array([6.0, 3.0, 3.0]),
)

# A native DSpark draft's own head: one logit for both rules. Its calibration files are those of heads, as SGLang's are.
NATIVE = HEAD._replace(shown=("head",), evidence=_of_features)


def source_of(shown: tuple[str, ...]) -> Source:
    """The source that keeps these of each position, as a trace names them.

    Raises:
        ValueError: none does.
    """
    for source in (HEADLESS, HEAD, NATIVE):
        if source.shown == shown:
            return source
    raise ValueError(f"no source of confidence shows {', '.join(shown)}; record the trace with this version.")
