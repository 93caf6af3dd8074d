"""Attention of the CPU engine: equal to attention computed one request and one query at a time, whatever the batch."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_dspark.engine.cpu import attention_math
from sglang_dspark.engine.cpu.attention import decode_attention_cpu, extend_attention_cpu
from sglang_dspark.engine.cpu.attention_plan import QUERY_BLOCK, Lengths, cut, group

SCALE = 0.3


class Case(NamedTuple):
    """A batch: contexts scattered over the pool, queries packed. Slots that no request owns hold NaN."""

    q: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    table: Tensor
    pool_rows: Tensor
    seq_lens: Tensor
    extend_lens: Tensor
    starts: Tensor


def make_case(
    seq_lens: list[int],
    extend_lens: list[int],
    heads: int = 6,
    kv_heads: int = 2,
    width: int = 16,
    value_width: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    R, longest, total = len(seq_lens), max(seq_lens), sum(seq_lens)
    pool = total + 7
    k_buffer = torch.full((pool, kv_heads, width), float("nan"), dtype=dtype)
    v_buffer = torch.full((pool, kv_heads, value_width), float("nan"), dtype=dtype)
    slots = torch.randperm(pool, generator=generator)[:total]
    k_buffer[slots] = torch.randn(total, kv_heads, width, generator=generator).to(dtype)
    v_buffer[slots] = torch.randn(total, kv_heads, value_width, generator=generator).to(dtype)
    pool_rows = torch.randperm(R + 3, generator=generator)[:R]
    table = torch.full((R + 3, longest + 5), pool - 1, dtype=torch.int32)
    for row, length, start in zip(pool_rows, seq_lens, torch.tensor([0, *seq_lens]).cumsum(0).tolist(), strict=False):
        table[row, :length] = slots[start : start + length].int()
    extend = torch.tensor(extend_lens, dtype=torch.int32)
    starts = (extend.cumsum(0) - extend).int()
    q = torch.randn(sum(extend_lens), heads, width, generator=generator).to(dtype)
    return Case(q, k_buffer, v_buffer, table, pool_rows, torch.tensor(seq_lens), extend, starts)


def reference(
    case: Case,
    *,
    causal: bool = True,
    window: int = 0,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree: Tensor | None = None,
) -> Tensor:
    """Every query by itself, in float64."""
    heads, kv_heads = case.q.shape[1], case.k_buffer.shape[1]
    out = torch.zeros(case.q.shape[0], heads, case.v_buffer.shape[2], dtype=torch.float64)
    for r, (seq, ext, start) in enumerate(
        zip(case.seq_lens.tolist(), case.extend_lens.tolist(), case.starts.tolist(), strict=True)
    ):
        slots = case.table[case.pool_rows[r], :seq].long()
        shared = heads // kv_heads  # query heads per KV head
        keys = case.k_buffer[slots].double().repeat_interleave(shared, dim=1)
        values = case.v_buffer[slots].double().repeat_interleave(shared, dim=1)
        for i in range(ext):
            position = seq - ext + i
            seen = torch.arange(seq) <= position if causal else torch.ones(seq, dtype=torch.bool)
            if tree is not None:
                seen = torch.cat([torch.ones(seq - ext, dtype=torch.bool), tree[r, i]])
            if window:
                seen &= torch.arange(seq) > position - window
            logits = torch.einsum("hd,shd->hs", case.q[start + i].double(), keys) * SCALE
            if logit_cap:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            logits = logits.masked_fill(~seen, -math.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(logits, dim=1)[:, :seq]
            out[start + i] = torch.einsum("hs,shd->hd", weights, values)
    return out


def run_extend(case: Case, *, causal: bool = True, window: int = 0, logit_cap: float = 0.0, sinks=None, tree=None):
    out = torch.full((case.q.shape[0], case.q.shape[1], case.v_buffer.shape[2]), float("nan"), dtype=case.q.dtype)
    mask = None if tree is None else tree.reshape(-1)
    extend_attention_cpu(
        case.q, None, None, out, case.k_buffer, case.v_buffer, 1.0, 1.0, case.table, case.pool_rows, case.seq_lens,
        case.extend_lens, case.starts, 0, SCALE, logit_cap, False, window, None, sinks, mask, causal,
    )  # fmt: skip
    return out


def run_decode(case: Case, *, window: int = 0, logit_cap: float = 0.0, sinks=None, key=None, value=None, loc=None):
    out = torch.full((case.q.shape[0], case.q.shape[1], case.v_buffer.shape[2]), float("nan"), dtype=case.q.dtype)
    decode_attention_cpu(
        case.q, case.k_buffer, case.v_buffer, 1.0, 1.0, out, key, value, loc, torch.empty(0), case.table,
        case.pool_rows, case.seq_lens, SCALE, logit_cap, False, window, None, sinks,
    )  # fmt: skip
    return out


def assert_same(out: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=7)


@settings(deadline=None, max_examples=40)
@given(lengths, st.sampled_from([0, 1, 5]), st.integers(0, 99))
def test_ragged_extend_equals_one_query_at_a_time(shape, window, seed):
    case = make_case([prefix + ext for prefix, ext in shape], [ext for _, ext in shape], seed=seed)
    assert_same(run_extend(case, window=window), reference(case, window=window))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.sampled_from([0, 1, 7]), st.booleans())
def test_decode_equals_one_query_at_a_time(seq_lens, window, weighted):
    case = make_case(seq_lens, [1] * len(seq_lens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_math, "WEIGHTED_SUM_SLOTS", 0 if weighted else 1 << 30)
        assert_same(run_decode(case, window=window), reference(case, window=window))


def test_batch_of_very_different_lengths_is_split_and_still_exact():
    case = make_case([700, 3, 650, 4, 5, 90], [1, 3, 300, 2, 5, 80])
    assert_same(run_extend(case), reference(case))


def test_long_prompt_is_cut_into_blocks_and_still_exact():
    case = make_case([2 * QUERY_BLOCK + 40], [2 * QUERY_BLOCK + 10], heads=2, kv_heads=1, width=8, value_width=8)
    assert_same(run_extend(case), reference(case))
    assert_same(run_extend(case, window=33), reference(case, window=33))
    assert_same(run_extend(case, causal=False), reference(case, causal=False))
    assert_same(run_extend(case, causal=False, window=33), reference(case, causal=False, window=33))


def test_rows_that_belong_to_no_request_get_zeros():
    case = make_case([9, 12], [3, 2])
    padded = case._replace(q=torch.cat([case.q, torch.full_like(case.q[:4], float("nan"))]))
    out = run_extend(padded)
    assert torch.equal(out[:5], run_extend(case)) and not out[5:].any()


def test_verify_rows_equal_decode_steps_of_the_same_positions():
    """What makes speculative output equal plain output: a verified position computes what its decode step would."""
    verify = make_case([30, 52, 17], [4, 1, 3])
    rows = run_extend(verify)
    for r in range(3):
        for i in range(int(verify.extend_lens[r])):
            row = int(verify.starts[r]) + i
            seq = verify.seq_lens[r : r + 1] - int(verify.extend_lens[r]) + i + 1
            step = verify._replace(q=verify.q[row : row + 1], pool_rows=verify.pool_rows[r : r + 1], seq_lens=seq)
            torch.testing.assert_close(run_decode(step)[0], rows[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("decode", [True, False])
def test_logit_cap_and_sinks(decode):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -0.5])
    case = make_case([20, 33, 6], [1, 1, 1] if decode else [3, 7, 6])
    run = run_decode if decode else run_extend
    for options in ({"logit_cap": 0.7}, {"sinks": sinks}, {"logit_cap": 0.7, "sinks": sinks, "window": 4}):
        assert_same(run(case, **options), reference(case, **options))


def test_tree_mask_decides_what_drafts_see_of_one_another():
    tree = torch.eye(5, dtype=torch.bool)
    tree[:, 0] = True
    tree[3, 1] = tree[4, 1] = tree[4, 3] = True
    trees = torch.stack([tree, torch.ones(5, 5, dtype=torch.bool).tril()])
    case = make_case([25, 9], [5, 5])
    assert_same(run_extend(case, tree=trees), reference(case, tree=trees))


def test_keys_and_values_of_different_width_as_in_latent_attention():
    case = make_case([20, 31], [4, 2], heads=4, kv_heads=1, width=24, value_width=16)
    assert_same(run_extend(case), reference(case))
    case = make_case([20, 31], [1, 1], heads=4, kv_heads=1, width=24, value_width=16)
    assert_same(run_decode(case), reference(case))


def test_uncompressed_latent_keys_attend_to_one_another_only():
    case = make_case([4, 3], [4, 3], heads=6, kv_heads=6)
    out = torch.empty_like(case.q)
    slots = torch.cat([case.table[row, :n] for row, n in zip(case.pool_rows, (4, 3), strict=True)]).long()
    compressed = torch.full((1, 1, 16), float("nan"))  # other heads than the keys passed: never read
    extend_attention_cpu(
        case.q, case.k_buffer[slots], case.v_buffer[slots], out, compressed, compressed, 1.0, 1.0, case.table,
        case.pool_rows, case.seq_lens + 50, case.extend_lens, case.starts, 4, SCALE, 0.0, False, 0, None, None,
        None, True,
    )  # fmt: skip
    assert_same(out, reference(case))


def test_cross_attention_reads_encoder_tokens_and_text_starts_after_them():
    case = make_case([12, 10], [2, 3])
    encoder = torch.tensor([5, 0])
    out = torch.empty_like(case.q)
    args = (case.k_buffer, case.v_buffer, 1.0, 1.0, case.table, case.pool_rows)
    cross = case._replace(seq_lens=torch.tensor([5, 10]))
    extend_attention_cpu(
        case.q, None, None, out, *args, case.seq_lens, case.extend_lens, case.starts, 3, SCALE, 0.0, True, 0,
        encoder, None, None, False,
    )  # fmt: skip
    assert_same(out[:2], reference(cross, causal=False)[:2])
    assert (out[2:] == 0).all(), "a request without encoder tokens attends to nothing"

    extend_attention_cpu(
        case.q, None, None, out, *args, case.seq_lens - encoder, case.extend_lens, case.starts, 3, SCALE, 0.0, False, 0,
        encoder, None, None, True,
    )  # fmt: skip
    shifted = case.table.clone()
    shifted[case.pool_rows[0]] = case.table[case.pool_rows[0]].roll(-5)
    text = case._replace(table=shifted, seq_lens=case.seq_lens - encoder)
    assert_same(out, reference(text))


def test_decode_stores_the_new_keys_and_values_before_attending():
    case = make_case([9, 14], [1, 1])
    expected = reference(case)
    loc = case.table[case.pool_rows, case.seq_lens - 1].long()
    key, value = case.k_buffer[loc].clone(), case.v_buffer[loc].clone()
    case.k_buffer[loc] = case.v_buffer[loc] = float("nan")
    assert_same(run_decode(case, key=key, value=value, loc=loc), expected)
    assert torch.equal(case.k_buffer[loc], key) and torch.equal(case.v_buffer[loc], value)


@pytest.mark.parametrize("decode", [True, False])
def test_bfloat16_is_as_close_as_its_rounding_allows(decode):
    case = make_case([40, 71, 12], [1, 1, 1] if decode else [4, 2, 12], dtype=torch.bfloat16)
    assert_same((run_decode if decode else run_extend)(case), reference(case), tolerance=3e-2)


def test_eight_bit_buffers_are_scaled_back():
    case = make_case([20, 9], [3, 2])
    half = case._replace(
        k_buffer=(case.k_buffer / 2).to(torch.float8_e4m3fn), v_buffer=(case.v_buffer / 4).to(torch.float8_e4m3fn)
    )
    out = torch.empty_like(case.q)
    extend_attention_cpu(
        half.q, None, None, out, half.k_buffer, half.v_buffer, 2.0, 4.0, half.table, half.pool_rows, half.seq_lens,
        half.extend_lens, half.starts, 3, SCALE, 0.0, False, 0, None, None, None, True,
    )  # fmt: skip
    restored = case._replace(k_buffer=half.k_buffer.float() * 2, v_buffer=half.v_buffer.float() * 4)
    assert_same(out, reference(restored))


def test_plan_is_made_again_when_a_length_or_the_table_changes_in_place():
    case = make_case([9, 14], [2, 2])
    run_extend(case)
    case.seq_lens[0] = 7
    assert_same(run_extend(case), reference(case))
    case.table[case.pool_rows[0], :7] = case.table[case.pool_rows[0], :7].flip(0).clone()
    assert_same(run_extend(case), reference(case))


@given(lengths, st.integers(1, 300), st.booleans())
def test_blocks_and_groups_cover_every_query_once_within_the_memory_bound(shape, max_slots, causal):
    requests, start = [], 0
    for prefix, ext in shape:
        requests.append(Lengths(start, 40 * ext, prefix + 40 * ext))
        start += 40 * ext
    groups = group(cut(requests, causal, 0), max_slots)
    covered = sorted(row for g in groups for b in g for row in range(b.query_start, b.query_start + b.query_len))
    assert covered == list(range(start))
    for members in groups:
        padded = len(members) * max(b.key_len for b in members)
        assert padded <= max_slots or len(members) == 1
        assert all(b.query_len <= QUERY_BLOCK for b in members)
