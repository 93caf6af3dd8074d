"""SGLang's verify planner with our decisions inside: how much is verified in all, and how much of each request.

What SGLang makes of the decisions stays its own: graph tiers, layouts, and the verify-all layout where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.kernels.ops.speculative.dspark.dspark_schedule import compute_sort_survival
from sglang.srt.environ import envs
from sglang.srt.speculative.dspark_components.dspark_planner import (
    DSparkVerifyPlanner,
    VerifyBudgetDecision,
    ragged_capture_max_slots,
    ragged_capture_num_tokens,
)
from sglang.srt.speculative.dspark_components.dspark_sps import SpsCostTable, is_uninitialized_sps_table
from sglang.srt.speculative.dspark_components.dspark_sts import DSparkStsCalibration
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from torch import Tensor

from sglang_dspark.engine.native.scheduling import NativeScheduling


class NativePlanner(DSparkVerifyPlanner):
    """DSparkVerifyPlanner whose budget is the plan that was made before the step drafted, in overlap mode and without.

    SGLang's own budget without overlap is a search over the confidence of the step's own draft, which decides with
    values that depend on the tokens it decides about; sampled output is then not the target's.
    """

    scheduling: NativeScheduling

    def confidence_budget_prepare(self) -> None:
        """Nothing to be done by SGLang's scheduler before the step: no budget comes from its relay of confidences,
        which may have arrived on one rank and not on another."""
        return None

    def room(self, requests: int) -> int | None:
        """Draft tokens of so many requests that fit into the captured graphs, below 0 where not even the requests do;
        None where there are no graphs. Past that SGLang gives up rows of different length and verifies everything."""
        tokens = ragged_capture_num_tokens(model_runner=self.model_runner)
        slots = ragged_capture_max_slots(model_runner=self.model_runner)
        if tokens is None:
            return None
        return -1 if slots is not None and requests > slots else tokens[-1] - requests

    def resolve_verify_token_budget(self, **_: Any) -> int:
        """The plan's budget, draft tokens of all requests together."""
        plan = self.scheduling.plan
        timed = plan.step_time == plan.step_time
        self._budget_planner.last_decision = VerifyBudgetDecision(
            budget=plan.budget,
            predicted_step_seconds=plan.step_time if timed else None,
            predicted_theta=plan.theta if timed else None,
        )
        return plan.budget

    def set_forced_budget_frac(self, frac: float | None) -> None:
        """SGLang's switch for experiments: this share of what is drafted is verified, whatever a plan would say."""
        super().set_forced_budget_frac(frac)
        self.scheduling.forced = frac

    def schedule_layout(self, **kwargs: Any) -> Any:
        """Stock, around the lengths of :meth:`_schedule_verify_lens`."""
        layout = super().schedule_layout(**kwargs)
        self.scheduling.verifies(None if layout is None else layout.verify_lens)
        return layout

    def _schedule_verify_lens(
        self, *, device: Any, budget: int | None, confidence: Tensor | None, **where: Tensor
    ) -> Tensor:
        lens = self.scheduling.lens(budget, device).to(device=device, dtype=torch.int32)
        self._tp_sync.sync(SpecTpSyncSite.DSPARK_PLAN, lens)
        if envs.SGLANG_DSPARK_DEBUG_CONFIDENCE_PREFIX_SCHEDULER.get() and confidence is not None:
            survival = compute_sort_survival(confidence)
            self._log_verify_lens_decision(budget=budget, sort_survival=survival, verify_lens=lens, **where)
        return lens


def history_lag() -> int:
    """How many steps old the confidence is that plans are made from, at least: as many as the user asks SGLang for, and
    otherwise what has come, which is of one step before, with overlap of two."""
    lag = envs.SGLANG_DSPARK_CONFIDENCE_RELAY_LAG_STEPS
    return max(int(lag.get()), 1) if lag.is_set() else 1


def without_table(table: Any) -> Any:
    """SGLang's step-cost table; a flat one of two points for the one that stands for no file, at which its planner
    would verify everything and warn. Neither prices anything: plans come from our cost model."""
    if not is_uninitialized_sps_table(table):
        return table
    return SpsCostTable([1, 2], [1.0, 1.0], max_batch_tokens=max(2, table.max_batch_tokens))


def calibration_for_sglang(original: Callable[[str], Any], path: str) -> Any:
    """What SGLang's confidence head is to be divided by: 1 where the file is ours, since our estimator reads it."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    if "format" not in content:
        return original(path)
    return DSparkStsCalibration(temperatures=[1.0] * len(next(iter(content["temperatures"].values()))))
