"""Verify policies that benchmarks compare with ours, through DSPARK_POLICY."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.confidence import Rows
from sglang_dspark.engine.policy import Policy


class Blind(Policy):
    """Schedules without any confidence: every draft token counts as its position's pooled acceptance."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        scheduler.estimator.evaluate = self._priors

    def _priors(self, shown: Tensor, rows: Rows) -> Tensor:
        priors = torch.tensor([prior.values() for prior in self.scheduler.priors], device=shown.device)
        return priors[rows.rule, : shown.shape[1]]
