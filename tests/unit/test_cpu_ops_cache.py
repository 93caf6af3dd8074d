"""Slot lists, accepted tokens and KV copies on CPU: equal to loops over requests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.engine.cpu.accept import fill_accept_out_cache_loc_cpu, fill_bonus_tokens_cpu, rotate_input_ids_cpu
from sglang_dspark.engine.cpu.cache_locs import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
)
from sglang_dspark.engine.cpu.kv_copy import copy_all_layer_kv_cache_cpu

WIDTH = 40
ranges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=5)
index_types = st.sampled_from([torch.int32, torch.int64])


def slot_table() -> torch.Tensor:
    return torch.randperm(10 * WIDTH).view(10, WIDTH).int()


@given(ranges, index_types)
def test_slots_of_ragged_ranges_are_written_and_read_back_in_order(spans, dtype):
    rows = torch.randperm(10)[: len(spans)].to(dtype)
    start = torch.tensor([s for s, _ in spans], dtype=dtype)
    end = torch.tensor([s + n for s, n in spans], dtype=dtype)
    slots = torch.arange(1000, 1000 + int((end - start).sum()))
    table = slot_table()
    expected, taken = table.clone(), 0
    for row, (s, n) in zip(rows.tolist(), spans, strict=True):
        expected[row, s : s + n] = slots[taken : taken + n].int()
        taken += n
    assign_req_to_token_pool_cpu(rows, table, start, end, slots, WIDTH)
    assert torch.equal(table, expected)

    read = torch.full((slots.numel() + 2,), -1)
    assign_extend_cache_locs_cpu(rows, table, start, end, read, WIDTH)
    assert torch.equal(read, torch.cat([slots, torch.tensor([-1, -1])])), "nothing past the ranges is written"


@pytest.mark.parametrize("topk", [1, 2])
def test_draft_slots_follow_the_committed_text(topk):
    table, rows, seq_lens, steps = slot_table(), torch.tensor([7, 2]), torch.tensor([5, 11]), 3
    out = torch.empty(2 * topk * steps, dtype=torch.int64)
    assign_draft_cache_locs_contiguous_cpu(rows, table, seq_lens, out, WIDTH, topk, steps)
    expected = [table[r, n : n + topk * steps] for r, n in ((7, 5), (2, 11))]
    assert torch.equal(out, torch.cat(expected).long())


@pytest.mark.parametrize("topk", [1, 3])
def test_every_draft_candidate_sees_the_prefix_and_its_own_slots(topk):
    table, rows, seq_lens, steps = slot_table(), torch.tensor([7, 2]), torch.tensor([5, 11]), 3
    out = build_draft_decode_metadata_cpu(table, rows, seq_lens, topk, steps, WIDTH)
    assert out.shape[0] == 2 * topk and out.dtype == table.dtype
    for b, (row, n) in enumerate(((7, 5), (2, 11))):
        for k in range(topk):
            own = table[row, n + k * steps : n + (k + 1) * steps]
            assert torch.equal(out[b * topk + k, : n + steps], torch.cat([table[row, :n], own]))


def test_draft_slots_may_end_at_the_table_edge():
    table = slot_table()
    seq_lens = torch.tensor([WIDTH - 4, 3])
    out = build_draft_decode_metadata_cpu(table, torch.tensor([1, 0]), seq_lens, 2, 2, WIDTH)
    assert torch.equal(out[1, WIDTH - 4 : WIDTH - 2], table[1, WIDTH - 2 :])


def test_bonus_token_is_the_last_accepted():
    bonus = torch.empty(3, dtype=torch.int32)
    fill_bonus_tokens_cpu(torch.arange(12, dtype=torch.int32), torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]


def test_accepted_slots_are_packed_in_order():
    out = torch.full((6,), -1)
    accepted = torch.tensor([[0, 1, -1], [3, -1, -1]], dtype=torch.int32)
    fill_accept_out_cache_loc_cpu(accepted, torch.tensor([50, 51, 52, 53, 54, 55]), out)
    assert out.tolist() == [50, 51, 53, -1, -1, -1]


@pytest.mark.parametrize("select", [None, [1, 0, 4]])
def test_inputs_shift_left_and_the_new_token_fills_the_gap(select):
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    starts, lengths = torch.tensor([0, 3, 3]), torch.tensor([3, 0, 3])
    picked = None if select is None else torch.tensor(select)
    rotate_input_ids_cpu(ids, starts, lengths, torch.tensor([[70], [80], [90]]), picked)
    assert ids.tolist() == ([2, 3, 70, 5, 6, 90] if select is None else [2, 70, 3, 5, 90, 6])


def test_kv_rows_move_in_every_buffer_even_when_the_lists_overlap():
    buffers = [torch.randn(10, 2, 4), torch.randn(10, 3).bfloat16(), torch.randn(10, 2, 4)]
    before = [b.clone() for b in buffers]
    target, source = torch.tensor([3, 4, 5, 9]), torch.tensor([4, 3, 4, 0])
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].numel() * b.element_size() for b in buffers])
    copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for now, was in zip(buffers, before, strict=True):
        expected = was.clone()
        expected[target] = was[source]
        assert torch.equal(now, expected)
    copy_all_layer_kv_cache_cpu(pointers, strides, target[:0], source[:0])
