"""The worker behind --speculative-algorithm DSPARK: SGLang's EAGLE worker, with a plan before and a schedule inside.

A decode step: plan depth and budget, draft, allocate the budget by the newest confidence, verify ragged, draft extend.
Drafting, acceptance, KV and output stay SGLang's (EAGLEWorkerV2); prefill is untouched.
"""

from __future__ import annotations

import time
from math import nan
from typing import Any

import numpy as np
import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_worker_common import run_eagle_verify
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from torch import Tensor

from sglang_dspark.confidence import HEAD, HEADLESS
from sglang_dspark.confidence.head import HEAD_RULES, ConfidenceHead
from sglang_dspark.engine.confidence_head import find_head, load_head
from sglang_dspark.engine.draft_worker import DSparkDraftWorker
from sglang_dspark.engine.graphs import prepare_depths, tier_of
from sglang_dspark.engine.policy import Policy
from sglang_dspark.engine.profile import pads_eagerly, profile
from sglang_dspark.engine.requests import has_adapters
from sglang_dspark.engine.sampling import verified_alone
from sglang_dspark.engine.scheduled import Scheduled
from sglang_dspark.engine.scheduler import Launched, Settled, StepBatch, spread, tokens_sent
from sglang_dspark.engine.uniform import VerifyTarget, reads_likeliest
from sglang_dspark.engine.verify import RaggedRows, cut_chain, end_chains, propose_nothing, ragged_rows
from sglang_dspark.schedule import Plan


class DSparkWorker(Scheduled, EAGLEWorkerV2):
    """EAGLEWorkerV2 that verifies, for each request, the draft tokens that are worth their cost."""

    _pads_eagerly = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # EAGLEWorkerV2 names its draft worker's class itself. Ours adds methods and buffers made later, nothing that
        # construction needs, so the instance can change its class.
        self._draft_worker.__class__ = DSparkDraftWorker
        self.gamma: int = self.speculative_num_steps
        self.start_deciding()
        self._plan: Plan | None = None
        self._warm = True
        self._batch: StepBatch | None = None
        self._launched: Launched | None = None

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Stock, then our buffers."""
        super().alloc_memory_pool(*args, **kwargs)
        head = self.faults.run("head", self._load_head, lambda: None)
        self.start_scheduling(HEADLESS if head is None else HEAD)
        drawn = self.settings.speculative_use_rejection_sampling
        rules = [HEAD_RULES.index("greedy"), HEAD_RULES.index("drawn" if drawn else "sampled")]
        self._draft_worker.start_watching(self.scheduler.slots, head, rules if head is not None else ())

    def _load_head(self) -> ConfidenceHead | None:
        draft, ranks = self.settings.speculative_draft_model_path, get_parallel().tp_group.world_size
        return load_head(find_head(self.options, draft, ranks), self.target_worker.model_runner.model)

    def init_cuda_graphs(self) -> None:
        """Stock, then the same for every depth, and the start-up profile: the last moment before requests come."""
        super().init_cuda_graphs()
        prepare_depths(self)
        self._pads_eagerly = pads_eagerly(self)
        self.start_pricing(profile, find_head(self.options, self.settings.speculative_draft_model_path, 1))

    # -- a step ----------------------------------------------------------------------------------------------------

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock, with the step's depth set first. Prefill and idle batches pass through."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            self.clock.interrupted()
            self._set_depth(self.gamma)
            return super().forward_batch_generation(batch, *args, **kwargs)
        start = time.perf_counter()
        self.clock.starts(start)
        self._batch = self.requests.describe(batch)
        plan = self._plan = self._make_plan(batch)
        self.reports.planned(plan, not self._warm, time.perf_counter() - start, self.scheduler.guard)
        self._set_depth(plan.depth)
        # SGLang's own switch for a step without draft: its extend stays out too, and stubs stand for its output.
        with envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.override(not self._warm):
            result = super().forward_batch_generation(batch, *args, **kwargs)
        if batch.seq_lens.is_cpu:  # elsewhere the host sees the step's end only when its outcome arrives
            self._timed(self._launched, self.clock.ends(time.perf_counter()))
        return result

    def _timed(self, sent: Launched | None, seconds: float) -> None:
        if sent is not None and self.faults.run("timing", lambda: self.scheduler.timed(sent, seconds), lambda: False):
            self.reports.timed(sent.plan, seconds)

    def _make_plan(self, batch: Any) -> Plan:
        described = self._batch
        assert described is not None

        def plan() -> Plan:
            on_host = batch.seq_lens.is_cpu
            first = self._draft_worker.first_shown[batch.req_pool_indices] if on_host else None
            return self.policy.plan(described, first)

        mine = self.faults.run("plan", plan, lambda: self.scheduler.verify_all(len(described.slots)))
        warm_before = self._warm
        agreed, self._warm = self.agreement.plan(described, mine, self.scheduler.warm)
        if agreed.depth and not warm_before:
            # After a step without an extend there is nothing to draft from, whoever plans it.
            self._warm = True
            return self.scheduler.verify_all(len(described.slots), 0)
        return even(agreed, len(described.slots)) if has_adapters(batch) else agreed

    def _set_depth(self, depth: int) -> None:
        self.speculative_num_steps, self.speculative_num_draft_tokens = depth, depth + 1
        self._draft_worker.set_depth(depth)

    def verify(self, batch: Any, pp_proxy_tensors: Any = None, grammar_barrier: Any = None) -> Any:
        """Stock run_eagle_verify over sum(1 + l_r) tokens; reports the verified lengths as ``cap_lens``."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, pp_proxy_tensors, grammar_barrier)
        plan, described = self._plan, self._batch
        assert plan is not None and described is not None
        requests, depth = len(batch.seq_lens), plan.depth
        if depth == 0:
            propose_nothing(batch.spec_info, requests, self.target_worker.model_config.vocab_size, self.device)
        shown = self._draft_worker.shown[:requests, :depth]
        confidence, lens = self.faults.run(
            "allocation",
            lambda: self._allocate(batch, plan, described, shown),
            lambda: (shown.new_zeros(requests, self.gamma), spread(plan, requests, shown.device)),
        )
        lens, rows = self._lay_out(batch, plan, self.agreement.lengths(lens))
        target = VerifyTarget(self.target_worker, rows, reads_likeliest(batch))
        result = run_eagle_verify(
            batch,
            target_worker=target,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            plan_stream=self.plan_stream,
            plan_stream_ctx=self.plan_stream_ctx,
            topk=self.topk,
            num_draft_tokens=depth + 1,
            device=self.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=True,
            grammar_barrier=grammar_barrier,
        )
        result.cap_lens = lens
        # The step goes with SGLang's result, so that no other step can be taken for it when the outcome is there.
        result.dspark_step = self._launched = self.faults.run(
            "history",
            lambda: self.scheduler.launched(described, plan, shown, confidence, target.tokens_seen),
            lambda: None,
        )
        return result

    def _lay_out(self, batch: Any, plan: Plan, lens: Tensor) -> tuple[Tensor, RaggedRows | None]:
        """The lengths [R] that the requests allow, and the rows of the forward; ends the chains accordingly."""
        width = plan.depth + 1
        alone = verified_alone(batch.sampling_info)
        even_rows = has_adapters(batch)
        sent = lens.new_full((len(lens),), width) if even_rows else lens
        if alone:
            lens = sent.index_fill(0, torch.tensor(alone, device=lens.device), 1)
        elif even_rows:
            lens = sent
        total = len(lens) * width if even_rows else self._tokens(plan, lens, exact=bool(alone))
        tier = tier_of(self.target_worker.model_runner, len(lens), total) or self._eager_tier(total)
        rows = ragged_rows(sent if even_rows else lens, width, total, self.gamma + 1, tier)
        if rows is not None:
            if even_rows:  # SGLang's LoRA takes the verify input's width for that of every row
                rows = rows._replace(widest=width)
            cut_chain(batch.spec_info, rows)
        if even_rows and alone:
            end_chains(batch.spec_info, lens, width)
        return lens, rows

    def _eager_tier(self, total: int) -> int | None:
        """What a verify of ``total`` tokens that runs without a graph is padded to, where that makes it faster."""
        cost = self.scheduler.cost if self._pads_eagerly else None
        return None if cost is None else cost.padded(total)

    def _allocate(self, batch: Any, plan: Plan, described: StepBatch, shown: Tensor) -> tuple[Tensor, Tensor]:
        draft = batch.spec_info.draft_token.view(len(described.slots), -1)[:, 1:]
        return self.policy.split(plan, described, shown, draft)

    def _tokens(self, plan: Plan, lens: Tensor, exact: bool) -> int:
        """sum(lens), without a look at the device wherever the scheduler's own allocation made them, and nothing else
        changed them (`exact`)."""
        if lens.is_cpu or exact or type(self.policy).allocate is not Policy.allocate:
            return int(lens.sum())
        return tokens_sent(plan, len(lens))

    @staticmethod
    def take_outcome(worker: Any, result: Any, batch: Any) -> None:
        """SGLang has a step's outcome on the host and is about to give it out: learn from it."""
        if isinstance(worker, DSparkWorker) and hasattr(result, "dspark_step"):
            sent = result.dspark_step
            settled = worker.faults.run("learning", lambda: worker._settle(sent, result), lambda: None)
            if settled is not None:
                worker.reports.settled(settled)

    def _settle(self, sent: Launched | None, result: Any) -> Settled | None:
        """sent: None for a step of which nothing can be learnt; that it arrived counts for those after it."""
        on_host = str(self.device).startswith("cpu")
        seconds = None if on_host else self.clock.arrives(time.perf_counter())
        if sent is None:
            return None
        if seconds is not None:
            self._timed(sent, seconds)
        accepted = result.accept_lens.numpy().astype(np.int64) - result.num_non_draft_tokens_per_req
        verified = result.cap_lens.numpy().astype(np.int64) - 1
        return self.scheduler.settle(sent, accepted, verified, self.requests.alive(sent.batch))


def even(plan: Plan, requests: int) -> Plan:
    """The plan for rows of one length: the same budget for every request, rounded up, and no draft deeper than that.

    It predicts nothing, as what it costs is not what was planned.
    """
    depth = -(-plan.budget // requests)
    return plan._replace(depth=depth, budget=depth * requests, tau=nan, step_time=nan, theta=nan)
