"""Which KV slots a request's tokens use: writes and reads rows of `req_to_token`.

Shapes: req_pool_indices [R] int, req_to_token [pool rows, pool_len] int32, seq_lens / start_offset / end_offset [R]
int, slot lists int64. Each function has the arguments and in-place outputs of the sgl_kernel operation of its name
(SGLang 0.5.23, srt/mem_cache/allocation.py and kernels/ops/speculative/cache_locs.py call them).
"""

import torch
from torch import Tensor


def _ragged_columns(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Row number and column of every element of the ranges [start_i, end_i), row by row. Two int64 tensors [sum]."""
    start, lengths = start.long(), (end - start).long()
    rows = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    return rows, torch.arange(rows.numel()) - (first - start)[rows]


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """req_to_token[request i, start_i:end_i] = the next end_i - start_i slots of out_cache_loc."""
    rows, columns = _ragged_columns(start_offset, end_offset)
    req_to_token[req_pool_indices[rows].long(), columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """out_cache_loc = the slots of positions start_i:end_i of every request, request after request."""
    rows, columns = _ragged_columns(start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[req_pool_indices[rows].long(), columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """out_cache_loc [R * topk * num_steps] = the topk * num_steps slots that follow every request's committed text."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], columns].reshape(-1))


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A slot table of one row per draft candidate: the request's prefix, then that candidate's num_steps draft slots.

    Returns [R * topk, width] in req_to_token's dtype. The native operation returns pool_len columns and leaves those
    past seq_len + num_steps undefined; here the width ends with the longest row, which is all that is ever read.
    """
    longest = int(seq_lens.max()) if seq_lens.numel() else 0
    columns = torch.arange(longest + num_steps)[None, None, :]
    prefix = seq_lens.long()[:, None, None]
    candidate = torch.arange(topk)[None, :, None]
    source = torch.where(columns < prefix, columns, columns + candidate * num_steps).clamp_(max=pool_len - 1)
    table = req_to_token[req_pool_indices.long()[:, None, None], source]
    return table.view(-1, table.shape[-1])
