"""What the workers of EAGLE and of native drafts share: a scheduler and all around it, and none of a step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_parallel

from sglang_dspark import __version__
from sglang_dspark.confidence import RULES, Estimator
from sglang_dspark.confidence.source import Source
from sglang_dspark.config import read_options
from sglang_dspark.cost import CostKey
from sglang_dspark.engine.agreement import Agreement, contents
from sglang_dspark.engine.calibration import temperatures
from sglang_dspark.engine.clock import StepClock
from sglang_dspark.engine.deployment import cost_key
from sglang_dspark.engine.faults import Faults
from sglang_dspark.engine.metrics import Reports, step_metrics
from sglang_dspark.engine.policy import load_policy
from sglang_dspark.engine.requests import RequestTable
from sglang_dspark.engine.scheduler import StepScheduler
from sglang_dspark.engine.step_cost import Profile, step_cost
from sglang_dspark.observe import TraceWriter


class Scheduled:
    """Mixed into a worker of SGLang's, which calls the three steps of its start in this order."""

    gamma: int
    server_args: Any
    target_worker: Any

    def start_deciding(self) -> None:
        """First, once the worker is constructed: what needs no model."""
        self.options = read_options()
        self.faults = Faults()
        self.agreement = Agreement(get_parallel().tp_group)
        self.cost_report: dict[str, Any] = {}
        self.clock = StepClock()

    def start_scheduling(self, source: Source) -> None:
        """Then, once there are pools: one row a request slot."""
        slots = self._runner.req_to_token_pool.req_to_token.shape[0]
        start = temperatures(self.settings.speculative_dspark_confidence_sts_path, source, self.gamma)
        self.scheduler = StepScheduler(slots, self.gamma, Estimator(slots, self.gamma, source, start))
        self.scheduler.trace = self.faults.run("trace", lambda: self._open_trace(source), lambda: None)
        metrics = self.faults.run("metrics", lambda: step_metrics(self.settings, self.gamma), lambda: None)
        self.reports = Reports(self.faults, metrics, self.agreement.is_first)
        self.requests = RequestTable(slots)
        self.policy = load_policy(self.options.policy, self.scheduler)

    def start_pricing(self, profile: Profile, head: Path | None = None) -> None:
        """Last, before requests come: the ranks compare what they were started with, and the step cost is found.

        profile: measures this kind of worker. head: the confidence head's file.
        """
        key = cost_key(self.settings, self._runner.model_config)
        self._refuse_other_settings(key, head)
        sps_path = self.settings.speculative_dspark_sps_table_path
        self.scheduler.cost, self.cost_report = step_cost(self, self.options, sps_path, key, profile)
        device = torch.device(self._runner.device)
        if device.type != "cpu":
            self.faults.run("allocation", lambda: self.scheduler.compile_allocation(device), lambda: None)

    def info(self) -> dict[str, Any]:
        """Counters, last plan, profile, faults and what is free in the pools, as plain JSON types."""
        return {
            **self.scheduler.info(),
            "cost": self.cost_report,
            "faults": dict(self.faults.counts),
            # Target and draft write the same slots of one allocator, so one number is both.
            "pools": {
                "kv_free": self._runner.token_to_kv_pool_allocator.available_size(),
                "requests_free": self._runner.req_to_token_pool.available_size(),
            },
        }

    @property
    def settings(self) -> Any:
        """The server's arguments as SGLang decided them: ``server_args`` hold None where the user said nothing."""
        return resolved_view(self.server_args)

    @property
    def _runner(self) -> Any:
        return self.target_worker.model_runner

    def _open_trace(self, source: Source) -> TraceWriter | None:
        path = self.options.trace
        if path is None or not self.agreement.is_first:
            return None
        return TraceWriter(path, self.gamma, source.shown, RULES, self.options.trace_bytes)

    def _refuse_other_settings(self, key: CostKey, head: Path | None) -> None:
        """Every rank must plan, price and estimate from the same flags, variables and files."""
        args = self.settings
        files = {
            "cost table": self.options.cost_table,
            "SPS table": args.speculative_dspark_sps_table_path,
            "calibration": args.speculative_dspark_confidence_sts_path,
            "confidence head": head,
        }
        mine = {"sglang_dspark": __version__, "num_steps": self.gamma, **asdict(self.options), **asdict(key)}
        self.agreement.refuse_differences({**mine, **{f"{name} contents": contents(p) for name, p in files.items()}})


def add_info(worker: Any, state: dict[str, Any]) -> None:
    """Put our part into SGLang's internal state, which /server_info shows."""
    if isinstance(worker, Scheduled):
        state["dspark"] = worker.faults.run("info", worker.info, dict)
