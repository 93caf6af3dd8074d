"""Ragged target verify: the target forward sees sum(1 + l_r) tokens, everything around it sees uniform rows.

Around the forward SGLang's EAGLE code (grammar, sampling, logprobs, draft extend, output processing) works on rows of
depth + 1 tokens. So only the forward is compacted: tokens, positions and KV slots of what is verified go in, and logits
and hidden states are scattered back to the uniform rows. Rows past 1 + l_r are never read, because the chain that the
samplers follow is cut there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, resolve_ragged_verify_layout
from torch import Tensor


class RaggedRows(NamedTuple):
    """Which of the uniform rows' tokens are verified. R requests, rows of ``width`` = depth + 1 tokens.

    widest: what the verify input says of the rows, gamma + 1 as the server's attention backends were made for; width
    where LoRA adapters take it for the length of every row.
    """

    layout: RaggedVerifyLayout
    kept: Tensor | None
    """[sum(verify_lens)] int64, positions in the flat [R * width] rows, ascending; None: all of them, unpadded."""
    width: int
    widest: int

    def compact(self, uniform: Tensor) -> Tensor:
        """[..., R * width] to [..., tokens of the forward]: what is verified, then zeros up to the graph's tier.

        Zero is a token, a position and the KV slot that SGLang gives to padding.
        """
        if self.kept is None:
            return uniform
        return F.pad(uniform[..., self.kept], (0, self.layout.graph_num_tokens - len(self.kept)))


def ragged_rows(verify_lens: Tensor, width: int, total: int, widest: int, tier: int | None = None) -> RaggedRows | None:
    """Layout for ``verify_lens`` [R] int32 in rows of ``width``, ``total`` = sum(verify_lens) of them.

    total is the shape of the forward, so the host must know it: reading it back would wait for the draft. tier: what
    the forward is padded to, to replay a graph. None without one where every row is full and as wide as the server's
    ``widest`` rows, which is what the attention backends take a verify without a layout for, whatever the width of its
    rows; the graphs of tiers always want one.
    """
    full = total == len(verify_lens) * width
    if full and width == widest and tier is None:
        return None
    layout = _layout(verify_lens, total, tier or total)
    if full and tier in (None, total):
        return RaggedRows(layout, None, width, widest)
    starts = layout.extend_start_loc.long()
    requests = torch.arange(len(verify_lens), device=verify_lens.device)
    row = torch.repeat_interleave(requests, verify_lens, output_size=total)
    kept = torch.arange(total, device=verify_lens.device) - starts[row] + row * width
    return RaggedRows(layout, kept, width, widest)


def _layout(verify_lens: Tensor, total: int, padded: int) -> RaggedVerifyLayout:
    """As SGLang's DSpark worker builds it: with the lengths on the host as well where they are there anyway."""
    if verify_lens.is_cpu:
        return RaggedVerifyLayout.from_verify_lens(
            verify_lens_cpu=verify_lens.tolist(), device=verify_lens.device, grid=[padded]
        )
    # Unlike there the host knows the sum, and flashinfer_mla asks for it.
    return RaggedVerifyLayout._assemble_device(
        verify_lens=verify_lens, graph_num_tokens=padded, total_verify_tokens=total
    )


def cut_chain(verify_input: Any, rows: RaggedRows) -> None:
    """End each request's chain at its verify length, in place, and give the verify input its rows."""
    verify_input.dspark_rows = rows
    if rows.kept is not None:
        end_chains(verify_input, rows.layout.verify_lens, rows.width)


def end_chains(verify_input: Any, verify_lens: Tensor, width: int) -> None:
    """End each request's chain at its verify length [R], in place.

    ``retrieve_next_token`` [R, width] is what the greedy and argmax-draft samplers and the grammar walk; the rule for
    sampled drafts reads draft probabilities, and a zero row there makes it sample from the target, which is what a
    position that was never proposed must do (a residual would be biased).
    """
    past = torch.arange(1, width + 1, device=verify_lens.device) >= verify_lens[:, None]
    verify_input.retrieve_next_token = verify_input.retrieve_next_token.masked_fill(past, -1)
    if verify_input.draft_probs is not None:
        verify_input.draft_probs = verify_input.draft_probs.masked_fill(past[:, :-1, None], 0.0)


def propose_nothing(verify_input: Any, requests: int, vocab: int, device: Any) -> None:
    """Give a step without drafts the draft distribution that the rule for sampled drafts asks for: zeros, which make it
    sample from the target. SGLang's own step without drafts has none and is refused under that rule."""
    # Without overlap its tokens are as the last verify left them, int32 on CUDA, where the kernels take int64 alone.
    verify_input.draft_token = verify_input.draft_token.long()
    if verify_input.draft_probs is None and get_spec().speculative_use_rejection_sampling:
        verify_input.draft_probs = torch.zeros(requests, 1, vocab, device=device)


def prepare_ragged(
    original: Callable[..., Any], verify_input: Any, req_to_token_pool: Any, batch: Any, target_worker: Any
) -> Any:
    """SGLang's eagle_prepare_for_verify, given the compact tokens, positions and KV slots where the rows are ragged.

    Afterwards the uniform ones are back: the draft extend writes the whole window, and the grammar needs whole rows.
    """
    rows: RaggedRows | None = getattr(verify_input, "dspark_rows", None)
    if rows is None or batch.forward_mode.is_idle():
        return original(verify_input, req_to_token_pool, batch, target_worker)
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func

    window = verify_input.prepared_out_cache_loc
    if window is None:
        window = assign_extend_cache_locs_uniform_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            batch_size=len(batch.req_pool_indices),
            draft_token_num=rows.width,
            device=batch.device,
        )
    uniform = {
        name: getattr(verify_input, name)
        for name in ("draft_token", "positions", "prepared_out_cache_loc", "prepared_mrope_positions", "kv_loc_plan")
    }
    if verify_input.prepared_mrope_positions is None and target_worker.model_runner.model_config.model_is_mrope:
        verify_input.prepared_mrope_positions = mrope_positions(verify_input.positions, batch.multimodal_inputs)
    verify_input.draft_token = rows.compact(verify_input.draft_token)
    verify_input.positions = rows.compact(verify_input.positions)
    verify_input.prepared_out_cache_loc = rows.compact(window)
    if verify_input.prepared_mrope_positions is not None:
        verify_input.prepared_mrope_positions = rows.compact(verify_input.prepared_mrope_positions)
    verify_input.kv_loc_plan = None  # planned for the whole window
    batch.spec_info = target_input(
        verify_input.draft_token, verify_input.positions, rows.layout, rows.widest, batch.seq_lens_cpu
    )
    try:
        return original(verify_input, req_to_token_pool, batch, target_worker)
    finally:
        for name, value in uniform.items():
            setattr(verify_input, name, value)
        batch.out_cache_loc, batch.spec_info = window, verify_input


def mrope_positions(positions: Tensor, inputs: Sequence[Any]) -> Tensor:
    """[3, R * width] positions of uniform rows, for a target that tells time, height and width apart.

    SGLang makes them of the verify input's positions taken for uniform rows, so it must be done before those are
    compacted. inputs: [R] each request's images, or None; what was decoded after them lies past them by a constant.
    """
    rows = positions.view(len(inputs), -1).long()
    if any(it is not None for it in inputs):
        past = [torch.zeros(1, dtype=torch.long) if it is None else it.mrope_position_delta.view(-1) for it in inputs]
        rows = rows + torch.stack(past).to(rows.device)
    return rows.flatten().repeat(3, 1)


def target_input(
    tokens: Tensor | None,
    positions: Tensor | None,
    layout: RaggedVerifyLayout,
    widest: int,
    seq_lens_cpu: Tensor | None = None,
) -> DFlashVerifyInput:
    """What the target is given with ragged rows, in a step and where graphs are captured: what SGLang's DSpark worker
    gives it.

    An EAGLE verify input would say rows of this step's depth, where MLA backends count on the layout's rows
    (flashinfer_mla) in windows of the widest (trtllm_mla). tokens, positions [tokens of the forward].
    """
    return DFlashVerifyInput(
        draft_token=tokens,
        positions=positions,
        draft_token_num=widest,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=layout,
        live_seq_lens_cpu=seq_lens_cpu,
    )


def fits_graphs(runner: Any, forward_batch: Any) -> bool:
    """Whether the runner's graphs hold rows of this batch's kind: ragged ones need those captured by token count."""
    return runner.ragged_verify_mode or resolve_ragged_verify_layout(forward_batch) is None


def ragged_extend_metadata(forward_batch: Any) -> tuple[Tensor, Tensor, Tensor, None] | None:
    """(seq_lens, extend_seq_lens, extend_start_loc, tree_mask) of a ragged verify batch; None for any other.

    seq_lens counts each request's own verified tokens, [R]; a chain needs no mask beyond the causal one.
    """
    layout = resolve_ragged_verify_layout(forward_batch) if forward_batch.forward_mode.is_target_verify() else None
    if layout is None:
        return None
    return forward_batch.seq_lens + layout.verify_lens, layout.verify_lens, layout.extend_start_loc, None
