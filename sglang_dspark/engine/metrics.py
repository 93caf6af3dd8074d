"""The scheduler's metrics under SGLang's labels, where the server has --enable-metrics."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

from sglang_dspark.engine.scheduler import Settled
from sglang_dspark.observe.metrics import StepMetrics
from sglang_dspark.schedule import Guard

logger = logging.getLogger(__name__)


def step_metrics(server_args: Any, gamma: int) -> StepMetrics | None:
    """The metrics of this process; None where the server has none, or another rank counts the same."""
    if not server_args.enable_metrics or get_parallel().tp_rank:
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


def report_settled(metrics: StepMetrics, settled: Settled) -> None:
    """Count a step and its outcome."""
    plan = settled.plan
    metrics.settled(plan.depth, settled.verified, settled.accepted, settled.tokens, plan.tau, settled.confidence)


def report_switches(metrics: StepMetrics | None, guard: Guard) -> None:
    """Log and count the modes that the guard changed to since the last call."""
    for mode, reason, lead in guard.take_switches():
        logger.info("DSPARK guard: %s from now on, %.2f times as fast by measurement (%s).", mode, lead, reason)
        if metrics is not None:
            metrics.switched(mode, reason)
