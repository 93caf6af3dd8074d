"""The start-up profile of a native DSpark draft: the target's verify, and the draft's block, by dummy steps.

A block costs the same whatever is verified of it, so it is priced like an EAGLE draft's extend: once in a step that
drafts, by requests. What is always done, writing the draft's context after a verify, is part of the verify.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

from sglang_dspark.cost import CostTable, Point, fit_table, profile_grid
from sglang_dspark.engine.graphs import tier_of, tiers_of
from sglang_dspark.engine.profile import CONTEXTS, MOST_REQUESTS, conclude, dummy_batch, measure


def profile(worker: Any, limit: float) -> tuple[CostTable | None, dict[str, Any]]:
    """Measure for at most about ``limit`` seconds; the cost table, and a report of what was measured.

    None where not even one target forward fitted into the limit: the server then verifies all that it drafts.
    """
    start = time.perf_counter()
    runner, gamma = worker.model_runner, worker.gamma
    tiers = tiers_of(runner)  # in graphs a verify is padded to one of these
    points = profile_grid(
        max_requests=min(runner.req_to_token_pool.size, MOST_REQUESTS),
        max_depth=gamma,
        contexts=[min(c, runner.model_config.context_len - gamma - 2) for c in CONTEXTS],
        max_kv_tokens=runner.token_to_kv_pool_allocator.size,
        tiers=tiers,
        free_depth=gamma,
    )
    grid = [_block(point) for point in points if point.kind != "extend"]
    samples = measure(worker, grid, {"verify": _verify, "extend": _draft}, start, limit)
    fit = partial(fit_table, tiers=tiers, free_depth=gamma)
    return conclude(samples, grid, start, limit, fit)


def _block(point: Point) -> Point:
    return point if point.kind == "verify" else point._replace(kind="extend", tokens=point.requests)


def _verify(worker: Any, point: Point) -> Callable[[], None]:
    runner, device, width = worker.model_runner, worker.device, worker.gamma + 1
    lens = build_capture_verify_lens(num_tokens=point.tokens, num_slots=point.requests, num_draft_tokens=width)
    tier = tier_of(runner, point.requests, point.tokens) or point.tokens
    layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device=device, grid=[tier])
    positions = torch.full((tier,), point.context, dtype=torch.long, device=device)
    padding = torch.zeros(tier, dtype=torch.long, device=device)
    info = DFlashVerifyInput(
        draft_token=padding,
        positions=positions,
        draft_token_num=width,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=layout,
        live_seq_lens_cpu=torch.full((point.requests,), point.context),
    )

    def run() -> None:
        batch = dummy_batch(worker, runner, ForwardMode.TARGET_VERIFY, point, info, padding.clone(), positions)
        output = worker.target_worker.forward_batch_generation(None, forward_batch=batch, is_verify=True)
        worker._kv_injector.inject_target_hidden(
            target_hidden=output.logits_output.hidden_states[: point.tokens],
            cache_loc=padding[: point.tokens],
            positions=positions[: point.tokens],
        )

    return run


def _draft(worker: Any, point: Point) -> Callable[[], None]:
    device, requests = worker.device, point.requests
    lens = torch.full((requests,), point.context, dtype=torch.int64, device=device)
    batch = SimpleNamespace(
        req_pool_indices=torch.arange(requests, dtype=torch.int64, device=device),
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        can_run_decode_cuda_graph=True,
        is_extend_in_batch=False,
        dp_spec_prefill_coordination_applied=False,
        global_num_tokens=None,
    )
    anchors = SimpleNamespace(bonus_tokens=torch.zeros(requests, dtype=torch.int64, device=device))

    def run() -> None:
        window = alloc_verify_window(
            batch=batch,
            bs=requests,
            device=device,
            verify_num_draft_tokens=worker.verify_num_draft_tokens,
            block_pos_offsets=worker._block_pos_offsets,
            model_runner=worker.model_runner,
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        with worker._draft_context():
            worker.propose(
                batch=batch,
                draft_input=anchors,
                verify_window=window,
                bs=requests,
                device=device,
                target_model=worker.model_runner.model,
                sampling_info=None,
            )

    return run
