"""The ragged layout: what goes to the target, what comes back, and where a chain ends."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.engine.uniform import Logits, VerifyTarget, reads_likeliest, scatter_rows
from sglang_dspark.engine.verify import cut_chain, prepare_ragged, ragged_rows, target_input


def lens_and_width():
    return st.integers(1, 9).flatmap(
        lambda width: st.tuples(st.lists(st.integers(1, width), min_size=1, max_size=12), st.just(width))
    )


def rows_of(lens, width, widest=None, tier=None):
    return ragged_rows(torch.tensor(lens, dtype=torch.int32), width, sum(lens), widest or width, tier)


@settings(deadline=None)  # a busy machine is not a slow function
@given(lens_and_width())
def test_compact_rows_hold_each_requests_prefix_and_scatter_back(case):
    lens, width = case
    rows = rows_of(lens, width)
    if sum(lens) == len(lens) * width:
        assert rows is None
        return
    want = [r * width + j for r, n in enumerate(lens) for j in range(n)]
    assert rows.kept.tolist() == want
    starts = [sum(lens[:r]) for r in range(len(lens) + 1)]
    assert rows.layout.qo_indptr_device.tolist() == starts
    assert rows.layout.extend_start_loc.tolist() == starts[:-1]
    compact = torch.arange(1.0, len(want) + 1)[:, None] * torch.ones(1, 3)
    uniform = scatter_rows(compact, rows)
    assert uniform.shape == (len(lens) * width, 3)
    assert torch.equal(uniform[rows.kept], compact)
    assert uniform.sum() == compact.sum()  # everything else is zero


def ragged_logits(lens=(1, 3, 2), width=3, vocab=7, padded=9):
    """Logits that are not written out yet, and the tensor that they stand for."""
    rows = ragged_rows(torch.tensor(lens, dtype=torch.int32), width, sum(lens), width, padded)
    compact = torch.randn(padded or sum(lens), vocab, generator=torch.Generator().manual_seed(0))
    return Logits(compact, rows), scatter_rows(compact, rows).clone()


@pytest.mark.parametrize(
    "rows", ({}, {"padded": None}, {"lens": (3, 3), "padded": None}), ids=("padded", "ragged", "full")
)
def test_a_greedy_verify_reads_the_likeliest_tokens_of_compact_rows_alone(rows):
    logits, whole = ragged_logits(**rows)
    assert (logits.shape, logits.device, logits.is_cuda) == (whole.shape, whole.device, False)
    assert torch.equal(torch.argmax(logits, dim=-1), whole.argmax(-1))
    assert logits._whole is None  # nothing was written out


@pytest.mark.parametrize(
    "use",
    (
        lambda it: torch.softmax(it, dim=-1), lambda it: torch.argmax(it, 0), lambda it: it.clone(), torch.isnan,
        lambda it: torch.cat([it, it]), lambda it: it.amax(dim=-1), lambda it: it.add_(1.0),
        lambda it: it[2:5], lambda it: torch.tensor(len(it)),
    ),
)  # fmt: skip
def test_whatever_else_is_asked_of_logits_is_answered_by_the_whole_tensor(use):
    logits, whole = ragged_logits()
    assert torch.equal(use(logits), use(whole))


def test_logits_that_were_changed_are_read_as_they_are():
    logits, whole = ragged_logits()
    bias = torch.zeros(7)
    bias[4] = 100.0
    logits.add_(bias)
    assert torch.argmax(logits, dim=-1).tolist() == [4] * len(whole)
    torch.nan_to_num_(logits, nan=0.0)
    assert torch.equal(logits.whole(), whole + bias)


def greedy_batch(**changed):
    info = {
        "is_all_greedy": True,
        "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
        "logit_bias": None,
        "has_custom_logit_processor": False,
        "has_watermark_candidates": False,
    }
    batch = {"has_grammar": False, "return_logprob": False}
    info, batch = ({**part, **{k: v for k, v in changed.items() if k in part}} for part in (info, batch))
    return SimpleNamespace(sampling_info=SimpleNamespace(**info), **batch)


@pytest.mark.parametrize(
    "asked",
    (
        {"is_all_greedy": False}, {"acc_additive_penalties": torch.ones(1)}, {"acc_scaling_penalties": torch.ones(1)},
        {"logit_bias": torch.ones(1)}, {"has_custom_logit_processor": True}, {"has_watermark_candidates": True},
        {"has_grammar": True}, {"return_logprob": True},
    ),
)  # fmt: skip
def test_logits_are_written_out_for_whoever_changes_or_asks_for_them(asked):
    assert reads_likeliest(greedy_batch()) and not reads_likeliest(greedy_batch(**asked))


def test_full_rows_come_back_as_they_are_whatever_their_width():
    for rows in (None, rows_of([3, 3], 3, widest=5)):
        output = SimpleNamespace(next_token_logits=torch.randn(6, 7), hidden_states=torch.randn(6, 2))
        before = output.next_token_logits, output.hidden_states
        worker = SimpleNamespace(forward_batch_generation=lambda *_, **__: SimpleNamespace(logits_output=output))  # noqa: B023
        batch = SimpleNamespace(input_ids=torch.zeros(6))
        VerifyTarget(worker, rows).forward_batch_generation(None, forward_batch=batch)
        assert output.next_token_logits is before[0] and output.hidden_states is before[1]
        VerifyTarget(worker, rows, likeliest=True).forward_batch_generation(None, forward_batch=batch)
        assert torch.equal(torch.argmax(output.next_token_logits, dim=-1), before[0].argmax(-1))


@pytest.mark.parametrize("width", (1, 3))
def test_full_rows_narrower_than_the_servers_have_a_layout_and_stay_as_they_are(width):
    # Without a layout an attention backend takes the server's widest rows for granted.
    rows = rows_of([width] * 4, width, widest=5)
    assert rows.kept is None and rows.layout.verify_lens.tolist() == [width] * 4
    info = verify_input(4, width, vocab=2)
    before = info.retrieve_next_token.clone(), info.draft_probs.clone()
    cut_chain(info, rows)
    assert info.dspark_rows is rows
    assert torch.equal(info.retrieve_next_token, before[0]) and torch.equal(info.draft_probs, before[1])


@settings(deadline=None)  # a busy machine is not a slow function
@given(lens_and_width())
def test_the_layout_is_the_one_sglang_builds_for_the_same_lengths(case):
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    lens, width = case
    rows = rows_of(lens, width)
    if rows is None:
        return
    stock = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device=torch.device("cpu"), grid=[sum(lens)])
    assert_equal(rows.layout, stock)


def assert_equal(one, other):
    for name in type(other).__struct_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
        else:
            assert mine == theirs, name


def verify_input(requests, width, vocab=None):
    chain = torch.arange(1, width + 1).repeat(requests, 1)
    chain[:, -1] = -1
    return SimpleNamespace(
        draft_token=torch.arange(requests * width),
        positions=torch.arange(requests * width) + 100,
        retrieve_next_token=chain,
        draft_probs=None if vocab is None else torch.ones(requests, width - 1, vocab),
        prepared_out_cache_loc=torch.arange(requests * width) + 1000,
        prepared_mrope_positions=None,
        kv_loc_plan="the window's plan",
    )


def test_a_chain_ends_at_its_verify_length():
    rows = rows_of([1, 3, 4], 4)
    info = verify_input(3, 4, vocab=2)
    cut_chain(info, rows)
    assert info.retrieve_next_token.tolist() == [[-1, -1, -1, -1], [1, 2, -1, -1], [1, 2, 3, -1]]
    assert info.draft_probs[:, :, 0].tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def target(mrope=False):
    return SimpleNamespace(model_runner=SimpleNamespace(model_config=SimpleNamespace(model_is_mrope=mrope)))


@pytest.mark.parametrize("fails", (False, True))
def test_the_target_is_given_the_compact_rows_and_the_uniform_ones_come_back(fails):
    rows = rows_of([1, 3], 4)
    info = verify_input(2, 4)
    cut_chain(info, rows)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False), out_cache_loc=None, spec_info=info, seq_lens_cpu=None
    )
    seen = {}

    def prepare(given, pool, given_batch, worker):
        forwarded = given_batch.spec_info
        assert forwarded.ragged_verify_layout is rows.layout and forwarded.draft_token_num == 4
        assert forwarded.draft_token is given.draft_token and forwarded.positions is given.positions
        seen.update(
            tokens=given.draft_token.tolist(),
            positions=given.positions.tolist(),
            slots=given.prepared_out_cache_loc.tolist(),
            plan=given.kv_loc_plan,
        )
        if fails:
            raise RuntimeError("planted")
        return "prepared"

    if fails:
        with pytest.raises(RuntimeError):
            prepare_ragged(prepare, info, None, batch, target())
    else:
        assert prepare_ragged(prepare, info, None, batch, target()) == "prepared"
    assert seen == {
        "tokens": [0, 4, 5, 6],
        "positions": [100, 104, 105, 106],
        "slots": [1000, 1004, 1005, 1006],
        "plan": None,
    }
    assert info.draft_token.tolist() == list(range(8)) and info.kv_loc_plan == "the window's plan"
    assert batch.out_cache_loc.tolist() == list(range(1000, 1008)) and batch.spec_info is info


@pytest.mark.parametrize("width", (2, 4))
def test_the_target_is_given_what_sglangs_dspark_worker_gives_it(width):
    from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor

    rows, lens_on_host = rows_of([1, 2, 1], width, widest=4), torch.tensor([30, 40, 50])
    tokens, positions = torch.arange(4), torch.arange(4) + 30
    kept = {}
    executor = SimpleNamespace(verify_num_draft_tokens=4, _forward_prepared_verify=lambda **kwargs: kept.update(kwargs))
    window = SimpleNamespace(verify_ids=tokens, positions=positions, verify_cache_loc=None, window_index=None)
    TargetVerifyExecutor._run_ragged(
        executor, batch=SimpleNamespace(seq_lens_cpu=lens_on_host, seq_lens_sum=120), layout=rows.layout,
        ragged_window=window, sampling_info=None, kv_loc_plan=None,
    )  # fmt: skip
    ours, theirs = target_input(tokens, positions, rows.layout, rows.widest, lens_on_host), kept["verify_input"]
    for field in fields(theirs):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "live_seq_lens_cpu":  # there they are read after the batch's were made longer
            assert len(mine) == len(other)
        else:
            assert mine is other or mine == other, field.name


@pytest.mark.parametrize("images", ([None, None, None], [None, 100, None], [7, None, -3]))
@pytest.mark.parametrize("lens, tier", (([1, 3, 1], None), ([4, 1, 2], 8), ([1, 1, 1], 6)))
def test_three_part_positions_are_those_that_sglang_gives_full_rows(images, lens, tier):
    """Also for padded rows, and where a request has an image, past which its text goes on."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    inputs = [None if past is None else SimpleNamespace(mrope_position_delta=torch.tensor([[past]])) for past in images]
    rows = rows_of(lens, 4, tier=tier)
    info = verify_input(3, 4)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False), seq_lens_cpu=None, spec_info=info, multimodal_inputs=inputs
    )
    stock = SimpleNamespace(seq_lens=torch.zeros(3), mrope_positions=None)
    ForwardBatch.compute_spec_mrope_positions(stock, SimpleNamespace(device="cpu"), batch)
    expected = stock.mrope_positions[:, rows.kept]
    cut_chain(info, rows)
    given = []
    prepare_ragged(lambda it, *_: given.append(it.prepared_mrope_positions), info, None, batch, target(mrope=True))
    assert torch.equal(given[0][:, : sum(lens)], expected) and not given[0][:, sum(lens) :].any()
    assert given[0].shape[1] == (tier or sum(lens)) and info.prepared_mrope_positions is None
