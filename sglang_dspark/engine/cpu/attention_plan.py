"""Decides how a ragged batch of queries is cut and padded into a few dense attention problems.

A forward pass attends with R requests of different query and context lengths. Padding everything to the longest wastes
work, one problem a request pays the fixed cost of a dozen tensor operations R times. So queries are cut into blocks,
and blocks that pad well together become a group: one gather of keys and values, one dense attention.

A plan depends on lengths and slots only. It is the same for every layer, so it is made once per forward pass.
"""

from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

# Long prompts are cut into blocks of this many queries: a block reads no keys past its last query, which saves about
# half the work of a causal prefill, and the masks stay small.
QUERY_BLOCK = 256
# Measured on one AVX2 core, float32, 9 query and 3 KV heads of 64: gathering a slot and attending to it with one query
# takes 0.27 us, every further query of the same request adds a tenth of that, and a group by itself costs 0.11 ms.
QUERY_WEIGHT = 0.1  # cost of one more query at a slot, in slots
GROUP_OVERHEAD = 400  # cost of one more group, in slots
# Bytes of keys (and as many of values) gathered at a time; a single block may need more, never more than one context.
GATHER_BYTES = 64 << 20
# Masks with more elements than this are made when needed instead of kept for all layers (4 bytes each).
KEPT_MASK = 1 << 20


class Lengths(NamedTuple):
    """One request: its queries are rows query_start.. of q, at context positions context_len - query_len and up."""

    query_start: int
    query_len: int
    context_len: int


class Block(NamedTuple):
    """Up to QUERY_BLOCK queries of one request and the context positions [key_start, key_end) they can see."""

    request: int
    query_start: int  # row in q of the first query
    query_len: int
    position: int  # context position of the first query
    key_start: int
    key_end: int

    @property
    def key_len(self) -> int:
        return self.key_end - self.key_start


def cut(requests: list[Lengths], causal: bool, window: int, query_block: int = QUERY_BLOCK) -> list[Block]:
    """Cut requests into blocks of at most query_block queries. window: keys a query sees, itself included; 0 for all.

    Requests without queries, and those without context (text without an image, under cross attention), give no block.
    """
    blocks = []
    for r, (start, query_len, context_len) in enumerate(requests):
        for offset in range(0, query_len if context_len else 0, query_block):
            rows = min(query_block, query_len - offset)
            position = context_len - query_len + offset
            key_start = max(0, position - window + 1) if window else 0
            key_end = position + rows if causal else context_len
            blocks.append(Block(r, start + offset, rows, position, key_start, key_end))
    return blocks


def _cost(count: int, query_len: int, key_len: int) -> float:
    return count * key_len * (1 + query_len * QUERY_WEIGHT)


def group(blocks: list[Block], max_slots: int) -> list[list[Block]]:
    """Partition blocks so that padding inside a group never costs more than a group of its own would.

    Returns groups in any order; each has at most max_slots padded slots, or one block.
    """

    def fits(count: int, queries: int, keys: int, own_cost: float) -> bool:
        waste = _cost(count, queries, keys) - own_cost
        return count * keys <= max_slots and waste <= GROUP_OVERHEAD

    def shape(members: list[Block]) -> tuple[int, int]:
        return max(b.query_len for b in members), max(b.key_len for b in members)

    if not blocks:
        return []
    if fits(len(blocks), *shape(blocks), sum(_cost(1, b.query_len, b.key_len) for b in blocks)):
        return [blocks]  # in the order of the batch, so that queries need no reordering
    groups: list[list[Block]] = []
    queries = keys = 0
    own_cost = 0.0
    for block in sorted(blocks, key=lambda b: (b.query_len, b.key_len), reverse=True):
        queries, keys = max(queries, block.query_len), max(keys, block.key_len)
        own_cost += _cost(1, block.query_len, block.key_len)
        if groups and fits(len(groups[-1]) + 1, queries, keys, own_cost):
            groups[-1].append(block)
        else:
            groups.append([block])
            queries, keys = block.query_len, block.key_len
            own_cost = _cost(1, queries, keys)
    return groups


@dataclass
class Group:
    """One dense problem: B blocks, T queries (padded) each, L keys (padded) each."""

    B: int
    T: int
    L: int
    slots: Tensor  # [B * L] rows of the key and value source
    query_rows: Tensor | slice  # rows of q, [B * T]; a slice where the blocks lie one after another unpadded
    output_rows: Tensor | None  # rows of [B * T] that are real, where some are padding
    visible: Tensor | None  # bool [B, T, L]; None: every key is visible to every query
    _masks: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict)
    _head_rows: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype, heads_per_key: int) -> Tensor | None:
        """Additive mask [B, 1, T * heads_per_key, L] (0 or -inf) for queries ordered position by position, or None."""
        if self.visible is None:
            return None
        key = (dtype, heads_per_key if self.T > 1 else 1)
        mask = self._masks.get(key)
        if mask is None:
            mask = torch.zeros(self.B, self.T, self.L, dtype=dtype).masked_fill_(~self.visible, float("-inf"))
            mask = mask.repeat_interleave(key[1], dim=1) if key[1] > 1 else mask
            mask = mask.view(self.B, 1, -1, self.L)
            if mask.numel() <= KEPT_MASK:
                self._masks[key] = mask
        return mask

    def head_rows(self, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the sources seen as [N * kv_heads, D]: of every key [B * kv_heads * L], of every value of every query
        head [B * heads * L], and where each query head's values start in the latter [B * heads]. int32.
        """
        key = (heads, kv_heads)
        if key not in self._head_rows:
            per_slot = (
                self.slots.view(self.B, 1, self.L).int() * kv_heads + torch.arange(kv_heads, dtype=torch.int32)[:, None]
            )
            values = per_slot[:, :, None].expand(-1, -1, heads // kv_heads, -1).reshape(-1)
            starts = torch.arange(0, values.numel(), self.L, dtype=torch.int32)
            self._head_rows[key] = (per_slot.view(-1), values, starts)
        return self._head_rows[key]


def build_group(
    blocks: list[Block],
    slot_table: Tensor,
    table_rows: Tensor,
    table_start: Tensor,
    causal: bool,
    window: int,
    tree: Tensor | None = None,
) -> Group:
    """Index tensors of one group.

    slot_table [rows, width] int, table_rows and table_start [R] int64: request r's context position p lies in slot
    slot_table[table_rows[r], table_start[r] + p]. tree: bool [R, n, n]: query i of a request sees the j-th of its
    last n positions if tree[r, i, j], and everything before them.
    """
    B, T, L = len(blocks), max(b.query_len for b in blocks), max(b.key_len for b in blocks)
    request, query_start, query_len, position, key_start, key_end = torch.tensor(blocks).unbind(1)
    keys = key_start[:, None] + torch.arange(L)  # [B, L] context positions
    in_context = keys < key_end[:, None]
    padded = bool((key_end - key_start != L).any())
    if padded:  # padding repeats the block's first slot: finite numbers that the mask removes
        keys = torch.where(in_context, keys, key_start[:, None])
    slots = slot_table[table_rows[request][:, None], table_start[request][:, None] + keys].view(-1)

    uniform = all(b.query_len == T for b in blocks)
    in_order = all(b.query_start == blocks[0].query_start + i * T for i, b in enumerate(blocks))
    query_rows: Tensor | slice
    if uniform and in_order:
        query_rows = slice(blocks[0].query_start, blocks[0].query_start + B * T)
    else:
        offsets = torch.minimum(torch.arange(T), query_len[:, None] - 1)
        query_rows = (query_start[:, None] + offsets).view(-1)
    output_rows = None if uniform else (torch.arange(T) < query_len[:, None]).view(-1).nonzero().view(-1)

    conditions = [in_context[:, None, :]] if padded else []
    query_position = position[:, None, None] + torch.arange(T)[None, :, None]
    if causal and T > 1:  # a block's last query sees all of the block's keys
        conditions.append(keys[:, None, :] <= query_position)
    if window:
        conditions.append(keys[:, None, :] > query_position - window)
    if tree is not None:
        n = tree.shape[-1]
        draft = keys - (key_end[:, None] - n)  # [B, L], negative in the committed prefix
        seen = tree[request[:, None, None], torch.arange(T)[None, :, None], draft.clamp(0, n - 1)[:, None, :]]
        conditions.append(seen | (draft < 0)[:, None, :])
    visible = reduce(torch.logical_and, conditions).expand(B, T, L) if conditions else None
    return Group(B, T, L, slots, query_rows, output_rows, visible)
