"""The scheduler's metrics under SGLang's labels, where the server has --enable-metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

from sglang_dspark.engine.faults import Faults
from sglang_dspark.engine.scheduler import Settled
from sglang_dspark.observe.metrics import StepMetrics
from sglang_dspark.schedule import Guard, Plan

logger = logging.getLogger(__name__)


def step_metrics(settings: Any, gamma: int) -> StepMetrics | None:
    """The metrics of this process; None where the server has none, or another rank counts the same."""
    if not settings.enable_metrics or get_parallel().tp_rank:
        return None
    return StepMetrics(labels(), gamma)


def labels() -> dict[str, Any]:
    """What SGLang puts on its scheduler's metrics (SchedulerMetricsCollector.create, 0.5.23)."""
    parallel = get_parallel()
    found = {
        "model_name": get_serving().served_model_name,
        "engine_type": DisaggregationMode.to_engine_type(get_disagg().disaggregation_mode),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        found["dp_rank"] = parallel.dp_rank
    return {**found, **(get_observability().extra_metric_labels or {})}


class Reports:
    """What steps report to the metrics, if the server has any, and to the log. A fault in it stops nothing."""

    def __init__(self, faults: Faults, metrics: StepMetrics | None, decides: bool = True) -> None:
        """decides: whether it is this rank's guard that is followed; the switches of another's never happen."""
        self._faults, self._metrics, self._decides = faults, metrics, decides
        if metrics is not None:
            faults.watch = metrics.fault

    def planned(self, plan: Plan, rests: bool, seconds: float, guard: Guard) -> None:
        """A step was planned in so many seconds; the guard may have changed its mode over it."""
        self._measure(lambda metrics: metrics.planned(plan.mode, plan.depth, plan.budget, rests, seconds))
        switches = guard.take_switches()
        for mode, reason, lead in switches if self._decides else ():
            logger.info("DSPARK guard: %s from now on, %.2f times as fast by measurement (%s).", mode, lead, reason)
            self._measure(lambda metrics, mode=mode, reason=reason: metrics.switched(mode, reason))

    def timed(self, plan: Plan, seconds: float) -> None:
        """A step whose time was planned took so many seconds."""
        self._measure(lambda metrics: metrics.timed(plan.step_time, seconds))

    def settled(self, it: Settled) -> None:
        """A step has its outcome."""
        plan, rows = it.plan, (it.verified, it.accepted, it.confidence, it.alive)
        self._measure(lambda metrics: metrics.settled(plan.depth, *rows, tokens=it.tokens, tau=plan.tau))

    def _measure(self, report: Callable[[StepMetrics], None]) -> None:
        metrics = self._metrics
        if metrics is not None:
            self._faults.run("metrics", lambda: report(metrics), lambda: None)
