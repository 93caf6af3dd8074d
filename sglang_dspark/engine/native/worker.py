"""The worker behind --speculative-algorithm DSPARK for a native DSpark draft: SGLang's own, with our decisions.

Drafter, verify, acceptance, KV and output are DSparkWorkerV2's. Before a step it is planned; a step that is planned
without a draft runs none; its outcome is learnt from.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dspark_components.dspark_draft import (
    DraftBlockResult,
    DraftProposal,
    resolve_draft_params,
)
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from torch import Tensor

from sglang_dspark import __version__
from sglang_dspark.confidence import NATIVE, RULES, Estimator
from sglang_dspark.config import read_options
from sglang_dspark.engine.agreement import Agreement, contents
from sglang_dspark.engine.calibration import temperatures
from sglang_dspark.engine.clock import StepClock
from sglang_dspark.engine.deployment import cost_key
from sglang_dspark.engine.faults import Faults
from sglang_dspark.engine.metrics import step_metrics
from sglang_dspark.engine.native.planner import NativePlanner, history_lag
from sglang_dspark.engine.native.profile import profile
from sglang_dspark.engine.native.scheduling import NativeScheduling
from sglang_dspark.engine.policy import load_policy
from sglang_dspark.engine.requests import RequestTable
from sglang_dspark.engine.scheduler import StepScheduler
from sglang_dspark.engine.step_cost import step_cost
from sglang_dspark.engine.verify import VerifyTarget
from sglang_dspark.observe import TraceWriter
from sglang_dspark.schedule import ConfidenceHistory


class NativeWorker(DSparkWorkerV2):
    """DSparkWorkerV2 that drafts where it pays, and verifies the draft tokens that are worth their cost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = read_options()
        self.faults = Faults()
        self.agreement = Agreement(get_parallel().tp_group)
        self.cost_report: dict[str, Any] = {}
        # DSparkWorkerV2 names its planner's class itself. Ours adds decisions made later, nothing that construction
        # needs, so the instance can change its class.
        self._verify_planner.__class__ = NativePlanner
        self.propose = self._proposer.propose
        self._proposer.propose = self._draft_or_not
        self._target = self._verify_executor.target_worker = VerifyTarget(self.target_worker, None)
        self._clock = StepClock()

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Stock, then our buffers: one row a request slot."""
        super().alloc_memory_pool(*args, **kwargs)
        slots = self.model_runner.req_to_token_pool.req_to_token.shape[0]
        start = temperatures(self.server_args.speculative_dspark_confidence_sts_path, NATIVE, self.gamma)
        scheduler = StepScheduler(slots, self.gamma, Estimator(slots, self.gamma, NATIVE, start))
        scheduler.history = ConfidenceHistory(slots, self.gamma, history_lag())
        scheduler.trace = self.faults.run("trace", self._open_trace, lambda: None)
        metrics = self.faults.run("metrics", lambda: step_metrics(self.server_args, self.gamma), lambda: None)
        if metrics is not None:
            self.faults.watch = metrics.fault
        policy = load_policy(self.options.policy, scheduler)
        self.scheduling = NativeScheduling(RequestTable(slots), scheduler, policy, self.faults, metrics, self.agreement)
        self._verify_planner.scheduling = self.scheduling

    def _open_trace(self) -> TraceWriter | None:
        path = self.options.trace
        if path is None or not self.agreement.is_first:
            return None
        return TraceWriter(path, self.gamma, NATIVE.shown, RULES, self.options.trace_bytes)

    def init_cuda_graphs(self) -> None:
        """Stock, then the start-up profile: the last moment before requests come."""
        super().init_cuda_graphs()
        key = cost_key(self.server_args, self.model_runner.model_config)
        sps_path = self.server_args.speculative_dspark_sps_table_path
        files = {
            "cost table": self.options.cost_table,
            "SPS table": sps_path,
            "calibration": self.server_args.speculative_dspark_confidence_sts_path,
        }
        mine = {"sglang_dspark": __version__, "block": self.gamma, **asdict(self.options), **asdict(key)}
        self.agreement.refuse_differences({**mine, **{f"{name} contents": contents(p) for name, p in files.items()}})
        cost, self.cost_report = step_cost(self, self.options, sps_path, key, profile)
        self.scheduling.scheduler.cost = cost

    # -- a step ----------------------------------------------------------------------------------------------------

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock, with the step planned first. Prefill and idle batches pass through."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            self._clock.interrupted()
            return super().forward_batch_generation(batch, *args, **kwargs)
        self._clock.starts(time.perf_counter())
        self.scheduling.begin(batch)
        self._target.tokens_seen = 0
        result = super().forward_batch_generation(batch, *args, **kwargs)
        on_host = batch.seq_lens.is_cpu  # elsewhere the host does not see here when the step ends
        seconds = self._clock.ends(time.perf_counter()) if on_host else None
        self.scheduling.sent(self._target.tokens_seen, seconds)
        return result

    def _draft_or_not(self, **kwargs: Any) -> DraftProposal:
        """DraftBlockProposer.propose, where the plan drafts."""
        if not self.scheduling.plan.depth:
            return no_proposal(self.gamma, kwargs["draft_input"].bonus_tokens, kwargs["sampling_info"])
        proposal = self.propose(**kwargs)
        self.scheduling.drafted(proposal.confidence_raw, proposal.draft_block.draft_tokens)
        return proposal

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Called by SGLang once a step's acceptance is on the host."""
        on_host = str(self.device).startswith("cpu")
        seconds = None if on_host else self._clock.arrives(time.perf_counter())
        self.scheduling.outcome(np.asarray(num_correct_drafts_per_req, np.int64), seconds)

    # -- what a person can see -------------------------------------------------------------------------------------

    @staticmethod
    def add_info(worker: Any, state: dict[str, Any]) -> None:
        """Put our part into SGLang's internal state, which /server_info shows."""
        if isinstance(worker, NativeWorker):
            state["dspark"] = worker.faults.run("info", worker.info, dict)

    def info(self) -> dict[str, Any]:
        """Counters, last plan, profile, faults and what is free in the pools, as plain JSON types."""
        runner = self.model_runner
        return {
            **self.scheduling.scheduler.info(),
            "cost": self.cost_report,
            "faults": dict(self.faults.counts),
            "pools": {
                "kv_free": runner.token_to_kv_pool_allocator.available_size(),
                "requests_free": runner.req_to_token_pool.available_size(),
            },
        }


def no_proposal(gamma: int, anchors: Tensor, sampling_info: Any) -> DraftProposal:
    """A block that stands for no draft: none of its tokens is verified, each request samples from the target.

    anchors: [R] each request's last token. The block repeats it, as a draft that is a function of the text: such a one
    is accepted with the target's own probability, or the target is sampled without it, which is the target again.
    """
    ids = anchors.view(-1, 1).expand(-1, gamma).contiguous()
    params = resolve_draft_params(sampling_info=sampling_info, bs=len(ids), device=ids.device)
    block = DraftBlockResult(
        draft_tokens=ids, corrected_logits=None, greedy_mask=params.greedy_mask,
        temperatures=params.temperatures, greedy_draft=True,
    )  # fmt: skip
    return DraftProposal(draft_block_ids=ids, draft_block=block)
