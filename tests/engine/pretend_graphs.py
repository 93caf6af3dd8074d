"""The target's graphs of ragged rows on a CPU server: SGLang's runner, with an eager forward for a replay.

What a graph would be handed is what the forward gets: the tier's tokens, request slots up to the captured ones, and the
rows that SGLang's backends make of a layout for them. What SGLang checks before a replay is checked.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.forward_context import forward_context, get_forward_context
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as sglang_runner
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout

from sglang_dspark.engine.worker import DSparkWorker
from tests.engine.policies import Switch

CAPTURED = [1, 2, 4, 6]  # requests; a batch of more runs eagerly


class Runner(sglang_runner.DecodeCudaGraphRunner):
    """Captures nothing. replays: how often each tier was, kept in the file named by TEST_TIERS_FILE."""

    def __init__(self, model_runner):
        self.model_runner, self.device = model_runner, torch.device("cpu")
        self.attn_backend = SimpleNamespace(supports_ragged_verify_graph=True)
        self.capture_bs, self.max_bs = CAPTURED, max(CAPTURED)
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.speculative_num_draft_tokens = self.captured_req_width = get_spec().speculative_num_draft_tokens
        self.capture_hidden_mode = CaptureHiddenMode.FULL
        self.require_mlp_sync = self.is_encoder_decoder = self.require_mlp_tp_gather = False
        self.buffers = SimpleNamespace(custom_mask=None)
        self.ragged_verify_mode = sglang_runner.ragged_verify_compact_graphs_enabled(model_runner.spec_algorithm)
        self.capture_num_tokens = self._build_ragged_verify_token_buckets()
        self._captured_ragged_layouts = {}
        self.captured = {tokens: self.get_spec_info(tokens) for tokens in self.capture_num_tokens}
        self.replays = Counter()

    def load_batch(self, forward_batch, pp_proxy_tensors=None):
        layout = resolve_ragged_verify_layout(forward_batch)
        tier = layout.graph_num_tokens
        assert self._ragged_graph_num_tokens(tier) == tier
        self.bs = self._ragged_capture_slots(tier)
        assert self.bs >= forward_batch.batch_size
        for name in ("input_ids", "positions", "out_cache_loc"):
            assert len(getattr(forward_batch, name)) == tier, name
        self._stage_ragged_verify_layout(layout, tier)
        baked = self.captured[tier].ragged_verify_layout
        # Where no slot is left over SGLang gives what pads the tier to the last request.
        mine = layout.bs - (layout.bs == self.bs)
        assert torch.equal(baked.verify_lens[:mine], layout.verify_lens[:mine])

    def execute(self, forward_batch, pp_proxy_tensors=None):
        self.load_batch(forward_batch)
        layout = resolve_ragged_verify_layout(forward_batch)
        more = self.bs - forward_batch.batch_size
        batch = copy.copy(forward_batch)
        batch.batch_size = self.bs
        batch.req_pool_indices = F.pad(batch.req_pool_indices, (0, more))
        for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens"):
            lens = getattr(batch, name)
            setattr(batch, name, None if lens is None else F.pad(lens, (0, more), value=1))
        batch.spec_info = copy.copy(batch.spec_info)
        batch.spec_info.ragged_verify_layout = layout.padded_to_bucket(padded_bs=self.bs)
        batch.forward_metadata_ready = False
        with forward_context(get_forward_context(), forward_batch=batch):
            output = self.model_runner.eager_runner.execute(batch)
        assert len(output.next_token_logits) == layout.graph_num_tokens
        self.replays[layout.graph_num_tokens] += 1
        Path(os.environ["TEST_TIERS_FILE"]).write_text(repr(dict(self.replays)))
        return output


class Tiers(Switch):
    """The Switch policy on a server whose target has such a runner."""

    def __init__(self, scheduler):
        super().__init__(scheduler)
        ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
        start = DSparkWorker.init_cuda_graphs

        def init_cuda_graphs(worker):
            worker.target_worker.model_runner.decode_cuda_graph_runner = Runner(worker.target_worker.model_runner)
            start(worker)

        DSparkWorker.init_cuda_graphs = init_cuda_graphs
