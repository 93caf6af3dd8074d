"""Times dummy steps through the real target and draft runners at start-up, and fits the cost model from them.

The dummies use request slots that no request holds yet, whose rows all point at the padding slot of the KV pool:
nothing is allocated, and what is written there is never read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import (
    get_draft_input_from_target_hidden_dim,
    get_draft_recurrent_hidden_state_spec,
)
from sglang.srt.speculative.ragged_verify import build_capture_verify_lens

from sglang_dspark.cost import CostTable, Point, Sample, fit_table, profile_grid
from sglang_dspark.engine.cpu import stand_ins_serve
from sglang_dspark.engine.graphs import tier_of, tiers_of
from sglang_dspark.engine.verify import ragged_rows, target_input

logger = logging.getLogger(__name__)

# What disturbs a forward makes it longer, and the fit takes the lower one of two; a third repeat would keep other
# points from being measured within the limit, which costs more. One that takes LONG seconds is no better for a second.
REPEATS, LONG = 2, 0.5
BLOCK = 40  # points; the first one holds all that the grid measures first and, where counts may be padded, all of those
CONTEXTS = (64, 2048)  # two lengths tell the attention's share; longer ones cost start-up time and add little
# Beyond this many requests the points measured already give the slope; those of a large server's full table would eat
# the time limit for rows that are rarely in use together.
MOST_REQUESTS = 64


def profile(worker: Any, limit: float) -> tuple[CostTable | None, dict[str, Any]]:
    """Measure for at most about ``limit`` seconds; the cost table, and a report of what was measured.

    None where not even one target forward fitted into the limit: the server then verifies all that it drafts.
    """
    start = time.perf_counter()
    gamma = worker.gamma
    runner = worker.target_worker.model_runner
    tiers = tiers_of(runner)  # in graphs a verify is padded to one of these
    padding = tiers is None and pads_eagerly(worker)
    grid = profile_grid(
        max_requests=min(worker.req_to_token_pool.size, MOST_REQUESTS),
        max_depth=gamma,
        contexts=[min(c, runner.model_config.context_len - gamma - 2) for c in CONTEXTS],
        max_kv_tokens=worker.token_to_kv_pool_allocator.size,
        tiers=tiers,
        padding=padding,
    )
    samples = measure(worker, grid, _RUNS, start, limit)
    worker.draft_worker.set_depth(gamma)
    return conclude(samples, grid, start, limit, partial(fit_table, tiers=tiers, padding=padding))


def pads_eagerly(worker: Any) -> bool:
    """Whether a verify outside of graphs may be padded: where our CPU attention gives rows of no request zeros, which
    nobody else promises; not with adapters, whose rows are all of one length."""
    cpu = str(worker.device).startswith("cpu") and stand_ins_serve()
    return cpu and worker.target_worker.model_runner.lora_manager is None


def measure(
    worker: Any, grid: list[Point], runs: Mapping[str, Callable[[Any, Point], Callable[[], None]]], start: float,
    limit: float,
) -> list[Sample]:  # fmt: skip
    """Time the grid's points, REPEATS times each unless one takes LONG seconds, until ``limit`` after ``start``.

    A point's repeats lie a block of points apart, so that a machine that is slow for seconds makes no count look dear
    beside the others.

    runs: for each kind of point, what makes the forward to be timed.
    """
    samples: list[Sample] = []
    warmed: set[str] = set()
    with torch.no_grad():
        for at in range(0, len(grid), BLOCK):
            block = grid[at : at + BLOCK]
            for _ in range(REPEATS):
                again = []
                for point in block:
                    if _first_ends(worker, time.perf_counter() - start > limit):
                        return samples
                    run = runs[point.kind](worker, point)
                    if point.kind not in warmed:  # first calls allocate and pick kernels
                        warmed.add(point.kind)
                        run()
                    before = time.perf_counter()
                    run()
                    _wait(worker.device)
                    seconds = time.perf_counter() - before
                    samples.append(Sample(point.kind, point.requests, point.tokens, point.kv_tokens, seconds))
                    if not _first_ends(worker, seconds > LONG):
                        again.append(point)
                block = again
    return samples


def conclude(
    samples: list[Sample], grid: list[Point], start: float, limit: float, fit: Callable[[list[Sample]], CostTable]
) -> tuple[CostTable | None, dict[str, Any]]:
    """The table that ``fit`` makes of the samples, and the report: see :func:`profile`."""
    seconds = time.perf_counter() - start
    report: dict[str, Any] = {"source": "profile", "seconds": round(seconds, 3), "samples": len(samples)}
    report["points"] = f"{len({s[:4] for s in samples})} of {len(grid)}"
    if not any(sample.kind == "verify" for sample in samples):
        logger.warning("DSPARK: no forward fitted into DSPARK_PROFILE_SECONDS=%s; verifying everything.", limit)
        return None, report
    table = fit(samples)
    report["table"] = table.summary()
    _log(report)
    return table, report


def _first_ends(worker: Any, ends: bool) -> bool:
    """Whether the first rank ends here: ranks that stop at different forwards would wait forever."""
    return bool(worker.agreement.first_says(ends))


def _log(report: dict[str, Any]) -> None:
    table = report["table"]
    counts = " ".join(f"{t:>8}" for t in table["tokens"])
    times = " ".join(f"{s:8.2f}" for s in table["ms"])
    logger.info(
        "DSPARK profile: %d forwards in %.1f s.\n  tokens    %s\n  target ms %s\n"
        "  + %.3f ms a request, %.3f ms a 1k context tokens\n"
        "  draft ms: %s (start, a forward, a request); extend ms: %s (fixed, a request, a token)",
        report["samples"], report["seconds"], counts, times, table["ms_per_request"], table["ms_per_1k_context"],
        table["draft_ms"], table["extend_ms"],
    )  # fmt: skip


def _wait(device: str) -> None:
    if not str(device).startswith("cpu"):
        torch.get_device_module(device).synchronize()


def _verify(worker: Any, point: Point) -> Callable[[], None]:
    device, width = worker.device, point.depth + 1
    lens = torch.tensor(
        build_capture_verify_lens(num_tokens=point.tokens, num_slots=point.requests, num_draft_tokens=width),
        dtype=torch.int32, device=device,
    )  # fmt: skip
    runner = worker.target_worker.model_runner
    tier = tier_of(runner, point.requests, point.tokens)
    rows = ragged_rows(lens, width, point.tokens, worker.gamma + 1, tier)
    positions = torch.full((tier or point.tokens,), point.context, dtype=torch.long, device=device)
    info = _uniform_input(point, positions) if rows is None else target_input(
        torch.zeros_like(positions), positions, rows.layout, rows.widest
    )  # fmt: skip

    def run() -> None:
        batch = dummy_batch(worker, runner, ForwardMode.TARGET_VERIFY, point, info, info.draft_token, positions)
        worker.target_worker.forward_batch_generation(None, forward_batch=batch, is_verify=True)

    return run


def _uniform_input(point: Point, positions: torch.Tensor) -> EagleVerifyInput:
    shape, device = (point.requests, point.depth + 1), positions.device
    return EagleVerifyInput(
        draft_token=torch.zeros_like(positions),
        custom_mask=torch.ones(0, dtype=torch.bool, device=device),
        positions=positions,
        retrieve_index=torch.zeros(shape, dtype=torch.long, device=device),
        retrieve_next_token=torch.zeros(shape, dtype=torch.long, device=device),
        retrieve_next_sibling=torch.zeros(shape, dtype=torch.long, device=device),
        retrieve_cum_len=None,
        spec_steps=point.depth,
        topk=1,
        draft_token_num=point.depth + 1,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=point.kv_tokens,
        seq_lens_cpu=torch.full((point.requests,), point.context),
    )


def _draft(worker: Any, point: Point) -> Callable[[], None]:
    draft, device, requests = worker.draft_worker, worker.device, point.requests
    size, dtype = get_draft_recurrent_hidden_state_spec(draft.draft_runner)

    def run() -> None:
        draft.set_depth(point.depth)
        info = EagleDraftInput(
            topk_p=torch.ones(requests, 1, device=device),
            topk_index=torch.zeros(requests, 1, dtype=torch.long, device=device),
            hidden_states=torch.zeros(requests, size, dtype=dtype, device=device),
            bonus_tokens=torch.zeros(requests, dtype=torch.int32, device=device),
            capture_hidden_mode=CaptureHiddenMode.LAST,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )
        positions = torch.full((requests,), point.context, dtype=torch.long, device=device)
        slots = torch.zeros(requests * point.depth, dtype=torch.long, device=device)
        tokens = torch.zeros(requests, dtype=torch.long, device=device)
        batch = dummy_batch(worker, draft.draft_runner, ForwardMode.DECODE, point, info, tokens, positions, slots)
        # With sampled drafts the draft loop asks; greedy rows of a mixed batch take the same time as sampled ones.
        one = torch.ones(requests, dtype=torch.int32, device=device)
        batch.sampling_info = SimpleNamespace(
            is_all_greedy=True, temperatures=one[:, None].float(), top_ks=one, sampling_seed=one.long()
        )
        run_draft(draft, batch, point.depth)

    return run


def run_draft(draft: Any, batch: ForwardBatch, depth: int) -> None:
    """The draft loop as SGLang runs it: a replay wherever there is a graph for the batch."""
    graph = draft.cuda_graph_runner
    with draft.contexts():
        if graph is not None and graph.can_run_graph(batch):
            graph.execute(batch)
            return
        if depth > 1:
            draft.draft_attn_backend.init_forward_metadata(batch)
            batch.mark_forward_metadata_ready()
        draft.draft_forward(batch)


def run_extend(draft: Any, batch: ForwardBatch, width: int) -> None:
    """The draft's extend over rows of ``width``, likewise."""
    graph = draft.cuda_graph_runner_for_draft_extend
    with draft.contexts():
        if graph is not None and graph.can_run_graph(batch):
            graph.execute(batch, torch.arange(0, batch.batch_size * width, width, device=batch.seq_lens.device))
            return
        draft.draft_runner.attn_backend.init_forward_metadata(batch)
        batch.mark_forward_metadata_ready()
        draft.draft_runner.forward(batch)


def _extend(worker: Any, point: Point) -> Callable[[], None]:
    draft, device, requests, width = worker.draft_worker, worker.device, point.requests, point.depth + 1
    size = get_draft_input_from_target_hidden_dim(draft.draft_runner)
    info = EagleDraftExtendInput(
        hidden_states=torch.zeros(requests * width, size, dtype=draft.draft_runner.dtype, device=device),
        num_correct_drafts=torch.zeros(requests, dtype=torch.int32, device=device),
        num_accept_tokens=torch.ones(requests, dtype=torch.int32, device=device),
        num_tokens_per_req=width,
        num_tokens_for_logprob_per_req=width,
    )
    positions = torch.full((requests * width,), point.context, dtype=torch.long, device=device)

    def run() -> None:
        draft.set_depth(point.depth)
        tokens = torch.zeros(requests * width, dtype=torch.long, device=device)
        batch = dummy_batch(worker, draft.draft_runner, ForwardMode.DRAFT_EXTEND_V2, point, info, tokens, positions)
        batch.seq_lens = batch.seq_lens + width
        batch.seq_lens_cpu = batch.seq_lens_cpu + width
        batch.extend_num_tokens = requests * width
        batch.extend_seq_lens = torch.full((requests,), width, dtype=torch.int32, device=device)
        batch.extend_prefix_lens = torch.full((requests,), point.context, dtype=torch.int32, device=device)
        batch.extend_start_loc = torch.arange(0, requests * width, width, dtype=torch.int32, device=device)
        batch.extend_seq_lens_cpu = [width] * requests
        batch.extend_prefix_lens_cpu = [point.context] * requests
        run_extend(draft, batch, width)

    return run


_RUNS: dict[str, Callable[[Any, Point], Callable[[], None]]] = {
    "verify": _verify,
    "draft": _draft,
    "extend": _extend,
}


def dummy_batch(
    worker: Any, runner: Any, mode: ForwardMode, point: Point, info: Any, tokens: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor | None = None,
) -> ForwardBatch:  # fmt: skip
    """A forward of ``runner`` over slots that no request holds, which writes to the padding slot of the KV pool."""
    device, requests = worker.device, point.requests
    lens = torch.full((requests,), point.context, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=requests,
        input_ids=tokens,
        req_pool_indices=torch.arange(requests, dtype=torch.int64, device=device),
        seq_lens=lens,
        out_cache_loc=torch.zeros_like(tokens) if slots is None else slots,
        seq_lens_sum=point.kv_tokens,
        seq_lens_cpu=lens.cpu(),
        orig_seq_lens=lens,
        positions=positions,
        mrope_positions=positions.expand(3, -1) if runner.model_config.model_is_mrope else None,
        spec_algorithm=runner.spec_algorithm,
        spec_info=info,
        capture_hidden_mode=info.capture_hidden_mode
        if mode is not ForwardMode.DRAFT_EXTEND_V2
        else CaptureHiddenMode.FULL,
        lora_ids=[None] * requests if runner.lora_manager is not None else None,
    )
    runner.kv_index_translator.bind_runner_slots(batch)
    return batch
