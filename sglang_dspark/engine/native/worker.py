"""The worker behind --speculative-algorithm DSPARK for a native DSpark draft: SGLang's own, with our decisions.

Drafter, verify, acceptance, KV and output are DSparkWorkerV2's. Before a step it is planned; a step that is planned
without a draft runs none; its outcome is learnt from.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from sglang.srt.speculative.dspark_components.dspark_draft import (
    DraftBlockResult,
    DraftProposal,
    resolve_draft_params,
)
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from torch import Tensor

from sglang_dspark.confidence import NATIVE
from sglang_dspark.engine.native.planner import NativePlanner, history_lag
from sglang_dspark.engine.native.profile import profile
from sglang_dspark.engine.native.scheduling import NativeScheduling
from sglang_dspark.engine.scheduled import Scheduled
from sglang_dspark.engine.uniform import VerifyTarget
from sglang_dspark.schedule import ConfidenceHistory


class NativeWorker(Scheduled, DSparkWorkerV2):
    """DSparkWorkerV2 that drafts where it pays, and verifies the draft tokens that are worth their cost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start_deciding()
        # DSparkWorkerV2 names its planner's class itself. Ours adds decisions made later, nothing that construction
        # needs, so the instance can change its class.
        self._verify_planner.__class__ = NativePlanner
        self.propose = self._proposer.propose
        self._proposer.propose = self._draft_or_not
        self._target = self._verify_executor.target_worker = VerifyTarget(self.target_worker, None)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Stock, then our scheduler."""
        super().alloc_memory_pool(*args, **kwargs)
        self.start_scheduling(NATIVE)
        self.scheduler.extends = False
        self.scheduler.history = ConfidenceHistory(self.scheduler.slots, self.gamma, history_lag())
        self.scheduling = NativeScheduling(
            self.requests, self.scheduler, self.policy, self.faults, self.reports, self.agreement,
            self._verify_planner.room,
        )  # fmt: skip
        self._verify_planner.scheduling = self.scheduling

    def init_cuda_graphs(self) -> None:
        """Stock, then the start-up profile: the last moment before requests come."""
        super().init_cuda_graphs()
        self.start_pricing(profile)

    # -- a step ----------------------------------------------------------------------------------------------------

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock, with the step planned first. Prefill and idle batches pass through."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            self.clock.interrupted()
            return super().forward_batch_generation(batch, *args, **kwargs)
        self.clock.starts(time.perf_counter())
        self.scheduling.begin(batch)
        self._target.tokens_seen = 0
        result = super().forward_batch_generation(batch, *args, **kwargs)
        on_host = batch.seq_lens.is_cpu  # elsewhere the host does not see here when the step ends
        seconds = self.clock.ends(time.perf_counter()) if on_host else None
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
        seconds = None if on_host else self.clock.arrives(time.perf_counter())
        self.scheduling.outcome(np.asarray(num_correct_drafts_per_req, np.int64), seconds)


def no_proposal(gamma: int, anchors: Tensor, sampling_info: Any) -> DraftProposal:
    """A block that stands for no draft: none of its tokens is verified, each request samples from the target.

    anchors: [R] each request's last token. The block repeats it, as a draft that is a function of the text: such a one
    is accepted with the target's own probability, or the target is sampled without it, which is the target again.
    """
    # Without overlap a sampled prefill's are int32; SGLang's own block is int64, and its acceptance indexes with it.
    ids = anchors.long().view(-1, 1).expand(-1, gamma).contiguous()
    params = resolve_draft_params(sampling_info=sampling_info, bs=len(ids), device=ids.device)
    block = DraftBlockResult(
        draft_tokens=ids, corrected_logits=None, greedy_mask=params.greedy_mask,
        temperatures=params.temperatures, greedy_draft=True,
    )  # fmt: skip
    return DraftProposal(draft_block_ids=ids, draft_block=block)
