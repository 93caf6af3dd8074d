"""Computes attention of one padded group: gathers its keys and values, attends, and writes its rows of the output."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.engine.cpu.attention_plan import Group


def _gather(source: Tensor, slots: Tensor, shape: tuple[int, int], dtype: torch.dtype, scale: float) -> Tensor:
    """Rows `slots` of source [N, H, D] as [B, H, L, D] (strided), in the queries' dtype."""
    heads, width = source.shape[1:]
    if source.stride(1) == width or heads == 1:  # whole rows are contiguous: one copy of H * D numbers a slot
        rows = source.as_strided((source.shape[0], heads * width), (source.stride(0), 1), source.storage_offset())
        gathered = rows.index_select(0, slots)
    else:
        gathered = source.index_select(0, slots)
    if gathered.dtype != dtype:
        gathered = gathered.to(dtype)
        if scale != 1.0:
            gathered = gathered * scale
    return gathered.view(*shape, heads, width).transpose(1, 2)


def _attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, logit_cap: float, sinks: Tensor | None
) -> Tensor:
    """Attention with capped logits and sinks [Hq] (a logit without a value), in float32. q [B, Hkv, T * G, D]."""
    logits = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if logit_cap > 0:
        logits = torch.tanh(logits / logit_cap).mul_(logit_cap)
    if mask is not None:
        logits += mask
    if sinks is not None:
        per_row = sinks.float().view(k.shape[1], 1, -1).expand(-1, q.shape[2] * k.shape[1] // sinks.numel(), -1)
        sink = per_row.reshape(1, k.shape[1], -1, 1).expand(q.shape[0], -1, -1, -1)
        weights = torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(logits, dim=-1)
    return torch.matmul(weights, v.float()).to(q.dtype)


def attend(
    group: Group,
    q: Tensor,
    k_source: Tensor,
    v_source: Tensor,
    output: Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Write the group's rows of output [tokens, Hq, Dv] from q [tokens, Hq, D] and rows of k_source / v_source [N,
    Hkv, .].

    Query heads that share a KV head become extra query rows of it, so keys and values are never repeated.
    """
    B, T, L = group.B, group.T, group.L
    heads, kv_heads = q.shape[1], k_source.shape[1]
    per_key = heads // kv_heads
    k = _gather(k_source, group.slots, (B, L), q.dtype, k_scale)
    v = _gather(v_source, group.slots, (B, L), q.dtype, v_scale)
    rows = q[group.query_rows] if isinstance(group.query_rows, slice) else q.index_select(0, group.query_rows)
    rows = rows.view(B, T, kv_heads, per_key, -1).transpose(1, 2).reshape(B, kv_heads, T * per_key, -1)
    mask = group.mask(q.dtype, per_key)
    if logit_cap > 0 or sinks is not None:
        result = _attend_explicitly(rows, k, v, mask, scale, logit_cap, sinks)
    else:
        result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    result = result.view(B, kv_heads, T, per_key, -1).transpose(1, 2).reshape(B * T, heads, -1)
    if group.output_rows is None:
        output[group.query_rows] = result
    else:
        assert isinstance(group.query_rows, Tensor)
        output.index_copy_(0, group.query_rows[group.output_rows], result.index_select(0, group.output_rows))
