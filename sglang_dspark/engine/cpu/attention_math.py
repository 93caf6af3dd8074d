"""Computes attention of one padded group: gathers its keys and values, attends, and writes its rows of the output."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.engine.cpu.attention_plan import Group

# From this many gathered slots on, weighting the values in place of gathering them pays for its extra operations
# (float32, 9 query and 3 KV heads of 64, one core: 0.13 against 0.09 ms at 128 slots, 0.36 against 0.33 at 1024, 0.81
# against 0.98 at 2048, 5.8 against 8.5 at 16384).
WEIGHTED_SUM_SLOTS = 1536


def _gather(source: Tensor, slots: Tensor, shape: tuple[int, int], dtype: torch.dtype, scale: float) -> Tensor:
    """Rows `slots` of source [N, H, D] as [B, H, L, D] (strided), in the queries' dtype."""
    heads, width = source.shape[1:]
    # Whole rows as one stretch of H * D numbers: index_select is then a memcpy per slot.
    gathered = source.flatten(1).index_select(0, slots) if source.is_contiguous() else source.index_select(0, slots)
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
    if sinks is None:
        return torch.matmul(torch.softmax(logits, dim=-1), v.float()).to(q.dtype)
    B, kv_heads, rows = q.shape[:3]
    sink = sinks.float().view(1, kv_heads, 1, -1).expand(B, -1, rows * kv_heads // sinks.numel(), -1)
    weights = torch.softmax(torch.cat([logits, sink.reshape(B, kv_heads, rows, 1)], dim=-1), dim=-1)
    return torch.matmul(weights[..., :-1], v.float()).to(q.dtype)


def _attend_with_weighted_sum(group: Group, q: Tensor, k_source: Tensor, v_source: Tensor, scale: float) -> Tensor:
    """One query a block, float32: [B, Hq, Dv]. Values are summed where they lie (an embedding bag per query head)."""
    B, L = group.B, group.L
    heads, kv_heads = q.shape[1], k_source.shape[1]
    key_rows, value_rows, starts = group.head_rows(heads, kv_heads)
    k = k_source.view(-1, k_source.shape[2]).index_select(0, key_rows).view(B * kv_heads, L, -1)
    rows = (q * scale).view(B * kv_heads, heads // kv_heads, -1)
    logits = torch.bmm(rows, k.transpose(1, 2)).view(B, heads, L)
    mask = group.mask(torch.float32, 1)
    if mask is not None:
        logits += mask.view(B, 1, L)
    weights = torch.softmax(logits, dim=-1).view(-1)
    values = v_source.view(-1, v_source.shape[2])
    summed = F.embedding_bag(value_rows, values, starts, mode="sum", per_sample_weights=weights)
    return summed.view(B, heads, -1)


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
    """Write the group's rows of output [tokens, Hq, Dv] from q [tokens, Hq, D] and the sources [N, Hkv, D or Dv].

    Query heads that share a KV head become extra query rows of it, so keys and values are never repeated.
    """
    B, T, L = group.B, group.T, group.L
    heads, kv_heads = q.shape[1], k_source.shape[1]
    per_key = heads // kv_heads
    rows = q[group.query_rows] if isinstance(group.query_rows, slice) else q.index_select(0, group.query_rows)
    plain = logit_cap <= 0 and sinks is None
    if (
        T == 1
        and plain
        and B * L >= WEIGHTED_SUM_SLOTS
        and q.dtype == k_source.dtype == v_source.dtype == torch.float32
        and k_source.is_contiguous()
        and v_source.is_contiguous()
    ):
        result = _attend_with_weighted_sum(group, rows, k_source, v_source, scale)
    else:
        k = _gather(k_source, group.slots, (B, L), q.dtype, k_scale)
        v = _gather(v_source, group.slots, (B, L), q.dtype, v_scale)
        if T > 1:
            rows = rows.view(B, T, kv_heads, per_key, -1).transpose(1, 2)
        rows = rows.reshape(B, kv_heads, T * per_key, -1)
        mask = group.mask(q.dtype, per_key)
        if plain:
            result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        else:
            result = _attend_explicitly(rows, k, v, mask, scale, logit_cap, sinks)
        if T > 1:
            result = result.view(B, kv_heads, T, per_key, -1).transpose(1, 2)
        result = result.reshape(B * T, heads, -1)
    if group.output_rows is None:
        if isinstance(group.query_rows, slice):
            output[group.query_rows] = result
        else:
            output.index_copy_(0, group.query_rows, result)
    else:
        assert isinstance(group.query_rows, Tensor)
        output.index_copy_(0, group.query_rows[group.output_rows], result.index_select(0, group.output_rows))
