"""Graphs of ragged rows: SGLang's own capture and replay, with everything padded to the captured token counts."""

import ast
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.engine.graphs import captures_tiers, prepare_depths, tier_of, tiers_of
from sglang_dspark.engine.uniform import scatter_rows
from sglang_dspark.engine.verify import fits_graphs, ragged_rows
from tests.engine.conftest import greedy, switched
from tests.engine.pretend_graphs import CAPTURED


def target_with(tiers, max_bs):
    return SimpleNamespace(
        decode_cuda_graph_runner=SimpleNamespace(ragged_verify_mode=True, capture_num_tokens=tiers, max_bs=max_bs)
    )


def test_greedy_output_is_plain_decoding_where_every_verify_replays_a_padded_tier(
    pairs, expected, prompts, tmp_path, monkeypatch
):
    tiers = tmp_path / "tiers"
    monkeypatch.setenv("TEST_TIERS_FILE", str(tiers))
    env = {"DSPARK_POLICY": "tests.engine.pretend_graphs:Tiers"}
    with switched(tmp_path, pairs.target, pairs.eagle3, "--speculative-num-steps", "4", env=env) as switch:
        for policy in ("none", "all", "random", "depths", "own"):
            server = switch.to(policy)
            server.flush()
            # Sixteen at once are more than were captured for, until most of them have ended.
            assert greedy(server, prompts) == expected, policy
            assert greedy(server, prompts[::3], 5) == expected[::3], policy
            assert greedy(server, prompts[:1]) == expected[:1], policy
        info = server.info()["dspark"]
    assert info["faults"] == {}
    replayed = ast.literal_eval(tiers.read_text())
    assert set(replayed) == {5 * requests for requests in CAPTURED}
    assert info["target_tokens"] > info["requests"] + info["verified"]  # what was padded counts as sent
    table = info["cost"]["table"]
    assert set(table["tokens"]) & set(replayed)  # and is what was measured


@pytest.mark.parametrize("lens", ([1], [5], [2, 1, 5], [5, 5, 5], [1, 1, 1], [3, 3, 1, 1, 5, 2]))
def test_padded_rows_are_those_that_sglangs_dspark_worker_builds(lens):
    from sglang.kernels.ops.speculative.dspark.dspark_verify_window import build_ragged_verify_window

    width, device = 5, torch.device("cpu")
    tier = tier_of(target_with([5, 10, 20, 40], 8), len(lens), sum(lens))
    rows = ragged_rows(torch.tensor(lens, dtype=torch.int32), width, sum(lens), width, tier)
    assert rows.layout.graph_num_tokens == tier
    drafts = torch.arange(100, 100 + len(lens) * width).view(len(lens), width)
    prefix = torch.arange(len(lens)) * 3 + 7
    req_to_token = torch.arange(1, 1 + len(lens) * 64, dtype=torch.int32).view(len(lens), 64)
    batch = SimpleNamespace(seq_lens=prefix, req_pool_indices=torch.arange(len(lens)))
    theirs = build_ragged_verify_window(
        batch=batch,
        layout=rows.layout,
        draft_block_ids=drafts[:, :1],
        draft_tokens=drafts[:, 1:],
        bs=len(lens),
        device="cpu",
        verify_num_draft_tokens=width,
        model_runner=SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=req_to_token)),
    )
    positions = (prefix[:, None] + torch.arange(width)).flatten()
    slots = req_to_token.gather(1, prefix[:, None] + torch.arange(width)).flatten()
    assert torch.equal(rows.compact(positions), theirs.positions)
    assert torch.equal(rows.compact(slots).long(), theirs.verify_cache_loc.long())
    assert torch.equal(rows.compact(drafts.flatten()), theirs.verify_ids)
    mrope = positions.repeat(3, 1)
    assert torch.equal(rows.compact(mrope)[2], theirs.positions)
    if rows.kept is not None:
        back = scatter_rows(rows.compact(drafts.flatten())[:, None], rows)
        assert torch.equal(back.view(-1)[rows.kept], drafts.flatten()[rows.kept])
    assert device == rows.layout.verify_lens.device


def test_a_batch_takes_the_tier_above_it_or_none():
    target = target_with([6, 12, 24], 4)
    assert [tier_of(target, 1, tokens) for tokens in (1, 6, 7, 24, 25)] == [6, 6, 12, 24, None]
    assert tier_of(target, 5, 6) is None  # more requests than captured slots
    assert tiers_of(target) == (6, 12, 24)
    for nothing in (SimpleNamespace(decode_cuda_graph_runner=None), SimpleNamespace(
        decode_cuda_graph_runner=SimpleNamespace(ragged_verify_mode=False))):  # fmt: skip
        assert tier_of(nothing, 1, 6) is None and tiers_of(nothing) is None


@pytest.mark.parametrize(
    ("env", "lora", "no_padding", "eagle", "want"),
    [
        (None, False, False, True, True),
        ("compact", False, False, True, True),
        ("static", False, False, True, False),  # the user's choice
        (None, True, False, True, False),  # SGLang refuses these two at capture
        (None, False, True, True, False),
        (None, False, False, False, False),
    ],
)
def test_graphs_are_captured_by_token_count_wherever_sglang_can(monkeypatch, env, lora, no_padding, eagle, want):
    from sglang_dspark.engine import graphs

    monkeypatch.delenv("SGLANG_RAGGED_VERIFY_MODE", raising=False)
    if env:
        monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", env)
    monkeypatch.setattr(graphs, "get_lora", lambda: SimpleNamespace(enable_lora=lora, lora_paths=None))
    graph = SimpleNamespace(disable_cuda_graph_padding=no_padding)
    monkeypatch.setattr(graphs, "get_exec", lambda: SimpleNamespace(graph=graph))
    algorithm = SimpleNamespace(is_eagle=lambda: eagle)
    assert captures_tiers(lambda _: False, algorithm) is want
    assert captures_tiers(lambda _: True, algorithm) is True


def test_a_runner_of_uniform_rows_takes_no_batch_with_a_layout():
    ragged = SimpleNamespace(spec_info=SimpleNamespace(ragged_verify_layout=object()))
    uniform = SimpleNamespace(spec_info=SimpleNamespace(ragged_verify_layout=None))
    by_size, by_tokens = SimpleNamespace(ragged_verify_mode=False), SimpleNamespace(ragged_verify_mode=True)
    assert [fits_graphs(runner, batch) for runner in (by_size, by_tokens) for batch in (ragged, uniform)] == [
        False, True, True, True,
    ]  # fmt: skip


class DraftOf:
    """What prepare_depths asks of SGLang's draft worker; a depth's graphs take 2 GB."""

    from sglang_dspark.engine.draft_worker import DSparkDraftWorker as Ours

    keep_depth, set_depth, _tap = Ours.keep_depth, Ours.set_depth, Ours._tap

    def __init__(self, gamma, captures):
        self.gamma, self.captures, self.depths = gamma, captures, {}
        self.draft_runner = SimpleNamespace()
        # One storage for all depths' graphs; SGLang makes it with the rows of the first, which is gamma.
        self.buffers = SimpleNamespace(extend_seq_lens=torch.full((4,), gamma + 1))
        self.device, self.gpu_id, self.left = "cuda", 0, 100.0
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None
        self.at(gamma)
        self.init_attention_backend()
        self._capture_cuda_graphs()

    def at(self, depth):
        self.speculative_num_steps, self.speculative_num_draft_tokens = depth, depth + 1
        self._topk1_parents_prealloc, self._topk1_score_indices_prealloc = f"parents {depth}", f"scores {depth}"

    def init_attention_backend(self):
        depth = self.speculative_num_steps
        self.draft_attn_backend, self.draft_extend_attn_backend = f"draft {depth}", f"extend {depth}"

    def _capture_cuda_graphs(self):
        if self.captures:
            self.left -= 2.0
            self.cuda_graph_runner = f"graph {self.speculative_num_steps}"
            self.cuda_graph_runner_for_draft_extend = SimpleNamespace(execute=lambda: None, buffers=self.buffers)
            assert self.buffers.extend_seq_lens.max() <= self.speculative_num_draft_tokens

    def contexts(self):
        return nullcontext()


def worker_with(draft, says=lambda mine: mine):
    @contextmanager
    def override(depth, tokens):
        assert tokens == depth + 1
        draft.at(depth)
        yield
        draft.at(draft.gamma)

    return SimpleNamespace(
        draft_worker=draft, gamma=draft.gamma, _override_worker_state=override,
        agreement=SimpleNamespace(first_says=says),
    )  # fmt: skip


def captured(draft):
    return {depth for depth, state in draft.depths.items() if state.draft_graph is not None}


@pytest.fixture
def memory(monkeypatch):
    from sglang_dspark.engine import graphs

    def leave(draft, gigabytes):
        draft.left = gigabytes
        monkeypatch.setattr(graphs, "get_available_gpu_memory", lambda *_: draft.left)

    return leave


def test_every_depth_has_backends_and_graphs_of_its_own(memory):
    draft = DraftOf(4, captures=True)
    memory(draft, 80.0)
    prepare_depths(worker_with(draft))
    assert captured(draft) == {0, 1, 2, 3, 4}
    for depth in (0, 3, 1, 4):
        draft.set_depth(depth)
        runner = draft.draft_runner
        assert (draft.draft_attn_backend, runner.draft_attn_backend) == (f"draft {depth}",) * 2
        assert (draft.draft_extend_attn_backend, runner.attn_backend) == (f"extend {depth}",) * 2
        assert draft.cuda_graph_runner == f"graph {depth}" and draft._topk1_parents_prealloc == f"parents {depth}"
        assert draft.cuda_graph_runner_for_draft_extend is draft.depths[depth].extend_graph


def test_depths_that_memory_has_no_graphs_for_draft_eagerly_and_the_log_says_so(memory, caplog):
    draft = DraftOf(4, captures=True)
    memory(draft, 8.0)  # one is captured, 6 are left; another, 4 are left; a third would come too close
    prepare_depths(worker_with(draft))
    assert captured(draft) == {1, 2, 4}
    assert draft.depths[3].draft_backend == "draft 3"
    assert "depths [0, 3]" in caplog.text


def test_ranks_capture_what_the_first_one_does(memory):
    draft = DraftOf(4, captures=True)
    memory(draft, 80.0)
    prepare_depths(worker_with(draft, says=lambda mine: False))
    assert captured(draft) == {4}


def test_without_graphs_nothing_is_captured_and_no_memory_asked_for(caplog):
    draft = DraftOf(3, captures=False)
    prepare_depths(worker_with(draft))
    assert captured(draft) == set() and set(draft.depths) == {0, 1, 2, 3} and not caplog.records
