"""The parts behind native DSpark drafts, without a server."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.confidence import NATIVE, Estimator
from sglang_dspark.cost import CostModel, CostTable, profile_grid
from sglang_dspark.engine.faults import Faults
from sglang_dspark.engine.metrics import Reports
from sglang_dspark.engine.native import arguments
from sglang_dspark.engine.native.planner import NativePlanner, calibration_for_sglang, without_table
from sglang_dspark.engine.native.scheduling import NativeScheduling, block_plan
from sglang_dspark.engine.native.worker import NativeWorker, no_proposal
from sglang_dspark.engine.policy import Policy
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler
from sglang_dspark.schedule import Plan
from tests.engine.conftest import refusal

GAMMA = 4
CPU = torch.device("cpu")


class Requests:
    """In place of RequestTable: slots 0.. of so many greedy requests."""

    def describe(self, batch):
        rows = np.arange(batch)
        return StepBatch(rows, np.ones(batch, np.int64), np.zeros(batch, np.int64), np.ones(batch, bool), 10 * batch)

    def alive(self, batch):
        return np.ones(len(batch.slots), bool)


def scheduling(policy=Policy, agree=lambda batch, plan, warm: (plan, warm), token_ms=0.01, block_ms=0.1):
    it = StepScheduler(16, GAMMA, Estimator(16, GAMMA, NATIVE))
    times = tuple((1.0 + token_ms * t) / 1e3 for t in (1, 64))
    table = CostTable((1, 64), times, draft_start=block_ms / 1e3, free_depth=GAMMA)
    it.cost = CostModel(table, max_depth=GAMMA)
    faults = Faults()
    return NativeScheduling(Requests(), it, policy(it), faults, Reports(faults, None), SimpleNamespace(plan=agree))


def step(it, requests, logit=3.0, accepted_of=lambda n: n, seconds=0.002):
    it.begin(requests)
    if it.plan.depth:
        it.drafted(torch.full((requests, GAMMA), logit), torch.zeros(requests, GAMMA, dtype=torch.long))
    lens = it.lens(it.plan.budget, CPU)
    it.verifies(lens)
    it.sent(int(lens.sum()), seconds)
    it.outcome(np.array([accepted_of(int(n) - 1) for n in lens]), None)
    return it.plan, lens


@pytest.mark.parametrize(
    "depth, budget, mode, expected",
    [
        (0, 0, "no_draft", (0, 0, "no_draft")),
        (2, 0, "no_draft", (0, 0, "no_draft")),
        (2, 6, "verify_all", (GAMMA, 6, "scheduled")),
        (GAMMA, 12, "verify_all", (GAMMA, 12, "verify_all")),
        (3, 5, "scheduled", (GAMMA, 5, "scheduled")),
    ],
)
def test_a_block_drafts_all_its_positions_or_none(depth, budget, mode, expected):
    made = block_plan(Plan(depth, budget, mode, 4.0, 0.1, 40.0), 3, GAMMA)
    assert (made.depth, made.budget, made.mode) == expected
    assert (made.tau, made.step_time, made.theta) == (4.0, 0.1, 40.0)


@pytest.mark.parametrize("share, budget", [(0.5, 6), (1.0, 12), (0.01, 0)])
def test_a_forced_budget_stays_forced_whatever_was_planned(share, budget):
    for plan in (Plan(0, 0, "no_draft", 3.0, 0.1, 30.0), Plan(GAMMA, 12, "verify_all", 9.0, 0.1, 90.0)):
        made = block_plan(plan, 3, GAMMA, share)
        assert (made.depth, made.budget) == (GAMMA, budget) and math.isnan(made.step_time)


def test_a_steep_cost_verifies_the_likely_and_a_steeper_one_drafts_nothing():
    it = scheduling(token_ms=0.001)
    assert step(it, 4)[0].mode == "verify_all"
    it = scheduling(token_ms=0.1)
    for _ in range(5):
        plan, lens = step(it, 4, logit=1.0, accepted_of=lambda n: min(n, 1))
    assert plan.mode == "scheduled" and 0 < plan.budget < 4 * GAMMA and int(lens.sum()) == 4 + plan.budget
    it = scheduling(token_ms=100.0)
    plan, lens = step(it, 4)
    assert plan.depth == 0 and lens.tolist() == [1] * 4


def test_what_is_verified_goes_to_the_more_confident():
    it = scheduling()
    it.forced = 0.5
    it.begin(2)
    it.drafted(torch.tensor([[-2.0] * GAMMA, [2.0] * GAMMA]), torch.zeros(2, GAMMA, dtype=torch.long))
    assert it.lens(it.plan.budget, CPU).tolist() == [1, 1 + GAMMA]


def test_outcomes_correct_the_confidence_the_prior_and_the_cost():
    it = scheduling()
    it.forced = 1.0
    for _ in range(60):
        step(it, 4, logit=2.0, accepted_of=lambda n: 0)
    it.begin(4)
    corrected = it.scheduler.confidence(torch.full((4, GAMMA, 1), 2.0), it._batch)
    assert float(corrected[:, 0].max()) < 0.3 < torch.tensor(2.0).sigmoid()
    assert it.scheduler.priors[0].values()[0] < 0.2
    it.forced = None
    before = it.scheduler.cost.bind(4, 40)(0, np.array([4]))[0]
    for _ in range(60):
        step(it, 4, seconds=0.010)
    assert it.scheduler.cost.bind(4, 40)(0, np.array([4]))[0] > 1.5 * before


def test_with_overlap_an_outcome_belongs_to_the_step_it_came_from():
    it = scheduling()
    it.forced = 1.0
    for requests in (3, 2):  # two steps are sent before the first outcome comes
        it.begin(requests)
        it.drafted(torch.zeros(requests, GAMMA), torch.zeros(requests, GAMMA, dtype=torch.long))
        it.verifies(it.lens(it.plan.budget, CPU))
        it.sent(requests * (1 + GAMMA), None)
    it.outcome(np.array([1, 2, 3]), 0.1)
    it.outcome(np.array([4, 0]), None)
    info = it.scheduler.info()
    assert it.faults.counts == {}
    assert (info["steps"], info["requests"], info["verified"], info["accepted"]) == (2, 5, 5 * GAMMA, 10)


def test_an_outcome_that_fits_no_step_is_a_fault_and_nothing_is_learnt_of_it():
    it = scheduling()
    it.begin(3)
    it.verifies(it.lens(None, CPU))
    it.sent(3, None)
    it.outcome(np.array([1]), None)
    assert it.faults.counts == {"learning": 1} and "steps" not in it.scheduler.counters


def test_after_a_fault_every_outcome_still_belongs_to_its_own_step(monkeypatch):
    it, settled = scheduling(), []
    it.forced = 1.0
    settle = it.scheduler.settle

    def broken_once(sent, *rest):
        settled.append(len(sent.batch.slots))
        return 1 / 0 if len(settled) == 1 else settle(sent, *rest)

    monkeypatch.setattr(it.scheduler, "settle", broken_once)
    sizes = [3, 2, 2, 3, 1]
    for at, requests in enumerate(sizes):
        it.begin(requests)
        it.drafted(torch.zeros(requests, GAMMA), torch.zeros(requests, GAMMA, dtype=torch.long))
        it.verifies(it.lens(it.plan.budget, CPU))
        it.sent(requests * (1 + GAMMA), None)
        if at:  # as with overlap, the outcome of the step before
            it.outcome(np.zeros(sizes[at - 1], np.int64), None)
    assert settled == sizes[:-1] and it.faults.counts == {"learning": 1}
    assert it.scheduler.counters["requests"] == sum(sizes[1:-1])


def test_a_step_is_noted_as_it_was_when_it_was_sent():
    """Its recent acceptance and its number, whatever is learnt and planned before its outcome comes."""
    it = scheduling()
    it.forced, seen = 1.0, []
    observe = it.scheduler.estimator.observe
    it.scheduler.estimator.observe = lambda shown, recent, *rest: seen.append(recent) or observe(shown, recent, *rest)
    expected = []
    for at in range(6):
        it.begin(2)
        expected.append(it.scheduler.estimator.recent(it._batch.rows).copy())
        it.drafted(torch.zeros(2, GAMMA), torch.zeros(2, GAMMA, dtype=torch.long))
        it.verifies(it.lens(it.plan.budget, CPU))
        it.sent(2 * (1 + GAMMA), None)
        if at:
            it.outcome(np.array([GAMMA, 0]), None)
    assert len(np.unique(np.stack(expected)[:, 0])) > 2
    assert np.array_equal(np.stack(seen), np.stack(expected[:-1]))


@pytest.mark.parametrize(
    "slots, tokens, requests, depth, budget",
    [
        (8, 64, 8, GAMMA, 8 * GAMMA),  # everything fits
        (8, 20, 8, GAMMA, 12),  # as much as the last tier holds
        (8, 8, 8, 0, 0),  # which is nothing
        (4, 64, 8, GAMMA, 8 * GAMMA),  # no slots: SGLang verifies everything, and so the step drafts
        (None, None, 8, GAMMA, 8 * GAMMA),  # no graphs
    ],
)
@pytest.mark.parametrize("pays", (True, False))
def test_a_plan_stays_within_the_captured_graphs(slots, tokens, requests, depth, budget, pays):
    planner = NativePlanner.__new__(NativePlanner)
    graphs = SimpleNamespace(ragged_verify_mode=True, capture_num_tokens=[8, tokens], max_bs=slots)
    planner.model_runner = SimpleNamespace(decode_cuda_graph_runner=None if tokens is None else graphs)
    it = scheduling(token_ms=0.001 if pays else 100.0)
    it.room = planner.room
    it.begin(requests)
    everything = slots is not None and requests > slots
    if pays or everything:
        assert (it.plan.depth, it.plan.budget) == (depth, budget)
        assert math.isnan(it.plan.step_time) == (everything or budget < requests * GAMMA)
    else:
        assert it.plan.depth == 0 and it.plan.step_time > 0


class Broken(Policy):
    def plan(self, batch, first_shown):
        raise RuntimeError("planted")

    def allocate(self, plan, confidence, draft):
        raise RuntimeError("planted")


def test_a_fault_verifies_everything_and_is_counted():
    it = scheduling(Broken)
    plan, lens = step(it, 3)
    assert plan.mode == "verify_all" and lens.tolist() == [1 + GAMMA] * 3
    assert it.faults.counts == {"plan": 1, "allocation": 1}


def test_a_fault_of_the_split_alone_stays_within_the_tier_that_the_budget_chose():
    it = scheduling(Broken)
    it.begin(3)
    assert it.lens(7, CPU).tolist() == [3, 3, 3]


def test_the_first_ranks_plan_is_everybodys():
    it = scheduling(agree=lambda batch, plan, warm: (plan._replace(depth=GAMMA, budget=2), warm))
    plan, lens = step(it, 3)
    assert plan.budget == 2 and int(lens.sum()) == 5


def test_sglang_asks_no_rank_local_relay_for_the_budget():
    planner = NativePlanner.__new__(NativePlanner)
    planner._budget_planner = SimpleNamespace(last_decision=None)
    planner.scheduling = scheduling()
    planner.scheduling.begin(4)
    assert planner.confidence_budget_prepare() is None
    assert planner.resolve_verify_token_budget(confidence=None) == planner.scheduling.plan.budget
    assert planner._budget_planner.last_decision.budget == planner.scheduling.plan.budget


def test_a_step_planned_without_a_draft_runs_none():
    worker = NativeWorker.__new__(NativeWorker)
    worker.gamma, worker.scheduling = GAMMA, scheduling(token_ms=100.0)
    worker.scheduling.begin(2)
    worker.propose = lambda **_: pytest.fail("the draft ran")
    anchors = SimpleNamespace(bonus_tokens=torch.tensor([5, 7]))
    made = worker._draft_or_not(draft_input=anchors, sampling_info=None)
    assert made.draft_block.draft_tokens.tolist() == [[5] * GAMMA, [7] * GAMMA]
    assert made.draft_block.greedy_draft and made.confidence is None and not made.folded
    assert worker.scheduling.lens(0, CPU).tolist() == [1, 1]


def test_a_step_without_a_draft_takes_the_tokens_of_a_sampled_prefill():
    """SGLang samples int32, and its acceptance takes int64."""
    from sglang.srt.speculative.dspark_components.dspark_verify import _draft_probs

    made = no_proposal(GAMMA, torch.tensor([5, 7], dtype=torch.int32), None)
    assert made.draft_block_ids.dtype == made.draft_block.draft_tokens.dtype == torch.int64
    assert _draft_probs(made.draft_block, 9, CPU).argmax(-1).tolist() == [[5] * GAMMA, [7] * GAMMA]


def test_what_the_draft_showed_outlives_the_storage_of_a_captured_graph():
    it = scheduling()
    it.begin(2)
    storage = torch.ones(2, GAMMA)
    it.drafted(storage, torch.zeros(2, GAMMA, dtype=torch.long))
    storage.zero_()  # the next replay
    assert it._shown[..., 0].tolist() == [[1.0] * GAMMA] * 2


@pytest.mark.parametrize("asked, lag", [(None, 1), (2, 2), (4, 4), (1, 1), (0, 1)])
def test_the_users_lag_is_kept(monkeypatch, asked, lag):
    from sglang_dspark.engine.native import planner

    name = "SGLANG_DSPARK_CONFIDENCE_RELAY_LAG_STEPS"
    monkeypatch.delenv(name, raising=False) if asked is None else monkeypatch.setenv(name, str(asked))
    assert planner.history_lag() == lag


def test_a_block_is_priced_once_and_by_requests():
    from sglang_dspark.cost import Sample, fit_table
    from sglang_dspark.engine.native.profile import _block

    grid = profile_grid(max_requests=8, max_depth=GAMMA, contexts=[64], max_kv_tokens=4096, free_depth=GAMMA)
    points = [_block(point) for point in grid if point.kind != "extend"]
    assert {point.kind for point in points} == {"verify", "extend"}
    cost = {"verify": lambda p: 0.01 + 0.001 * p.tokens, "extend": lambda p: 0.004 + 0.002 * p.requests}
    samples = [Sample(p.kind, p.requests, p.tokens, p.kv_tokens, cost[p.kind](p)) for p in points]
    model = CostModel(fit_table(samples, free_depth=GAMMA), max_depth=GAMMA)
    times = [float(model.step_time(4, depth, 4, 256)) for depth in range(GAMMA + 1)]
    assert times[1:] == pytest.approx([times[0] + 0.012] * GAMMA, rel=0.02)


def test_only_the_table_that_stands_for_no_file_is_replaced():
    from sglang.srt.speculative.dspark_components.dspark_sps import (
        SpsCostTable,
        build_uninitialized_sps_table,
        is_uninitialized_sps_table,
    )

    users = SpsCostTable([1, 8], [100.0, 50.0], max_batch_tokens=8)
    assert without_table(users) is users
    assert not is_uninitialized_sps_table(without_table(build_uninitialized_sps_table(max_batch_tokens=64)))


def test_sglang_divides_by_nothing_where_the_calibration_is_ours(tmp_path):
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    ours.write_text(json.dumps({"format": "sglang-dspark-calibration/1", "temperatures": {"greedy": [2.0] * GAMMA}}))
    theirs.write_text(json.dumps({"temperatures": [2.0] * GAMMA}))
    original = lambda path: path  # noqa: E731
    assert calibration_for_sglang(original, str(ours)).temperatures == [1.0] * GAMMA
    assert calibration_for_sglang(original, str(theirs)) == str(theirs)


@pytest.fixture
def mode(monkeypatch):
    """SGLANG_RAGGED_VERIFY_MODE unset, and put back afterwards."""
    monkeypatch.delenv(arguments.MODE.name, raising=False)
    monkeypatch.setattr(arguments, "_set_here", False)
    yield arguments.MODE
    arguments.forget_mode()


def test_ragged_verify_is_on_by_default_for_native_drafts(resolve, pairs, mode):
    args = resolve(draft=pairs.dspark)
    assert mode.get() == "compact" and arguments.why_sglangs_own(args) is None


def test_the_default_ends_with_its_server(resolve, pairs, mode):
    resolve(draft=pairs.dspark)
    resolve("--speculative-num-steps", "2")
    assert not mode.is_set()


@pytest.mark.parametrize("value", ("static", "cap-accept", "compact"))
def test_the_users_verify_mode_is_kept(resolve, pairs, mode, monkeypatch, value):
    monkeypatch.setenv(mode.name, value)
    args = resolve(draft=pairs.dspark)
    assert mode.get() == value
    assert (arguments.why_sglangs_own(args) is None) == (value == "compact")


def test_what_cannot_verify_ragged_rows_stays_static(resolve, pairs, mode):
    args = resolve("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", draft=pairs.dspark)
    assert not mode.is_set() and "LoRA" in arguments.why_static(args)


@pytest.mark.parametrize("gpu, stays", (("sm90", True), ("sm120", True), ("sm100", False)))
def test_trtllm_mha_stays_static_on_a_gpu_where_it_takes_rows_of_one_length(
    resolve, pairs, mode, monkeypatch, gpu, stays
):
    from sglang.srt.runtime_context import override_platform

    args = resolve(draft=pairs.dspark)
    monkeypatch.setattr(arguments, "attention_backends_of", lambda args: ("trtllm_mha", "trtllm_mha"))
    with override_platform(is_sm90=gpu == "sm90", is_sm120=gpu == "sm120"):
        why = arguments.why_static(args)
    assert ("--attention-backend trtllm_mha" in why) if stays else why is None


def test_a_target_whose_linear_attention_reads_uniform_rows_stays_static(resolve, pairs, mode, tmp_path):
    hybrid = shutil.copytree(pairs.target, tmp_path / "hybrid")
    config = json.loads((hybrid / "config.json").read_text())
    config |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    (hybrid / "config.json").write_text(json.dumps(config))
    args = resolve("--disable-radix-cache", draft=pairs.dspark, target=hybrid)
    assert not mode.is_set() and "linear attention" in arguments.why_static(args)


def test_a_target_with_positions_of_three_parts_stays_static(resolve, pairs, mode, monkeypatch):
    args = resolve(draft=pairs.dspark)
    model = SimpleNamespace(model_is_mrope=True)
    monkeypatch.setattr(arguments, "model_config_of", lambda _: model)
    monkeypatch.setattr(arguments, "reads_uniform_rows", lambda _: False)
    assert "three parts" in arguments.why_static(args)


@pytest.mark.parametrize("missing", ("in the config", "in the weights"))
def test_a_draft_without_a_confidence_head_stays_static(resolve, pairs, mode, tmp_path, missing):
    copy = shutil.copytree(pairs.dspark, tmp_path / "draft")
    if missing == "in the config":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "enable_confidence_head": False}))
    else:
        weights = load_file(copy / "model.safetensors")
        save_file({n: w for n, w in weights.items() if "confidence" not in n}, copy / "model.safetensors")
    args = resolve(draft=copy)
    assert not mode.is_set() and "confidence head" in arguments.why_static(args)


def test_the_block_size_given_is_the_one_drafted(resolve, pairs, mode):
    from sglang.srt.arg_groups.overrides import resolved_view

    args = resolve("--speculative-dspark-block-size", "3", draft=pairs.dspark)
    assert resolved_view(args).speculative_num_draft_tokens == 4


def test_files_that_cannot_be_used_are_refused(resolve, pairs, mode, tmp_path, monkeypatch):
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    for flag in ("--speculative-dspark-sps-table-path", "--speculative-dspark-confidence-sts-path"):
        assert str(damaged) in refusal(lambda flag=flag: resolve(flag, str(damaged), draft=pairs.dspark))
    monkeypatch.setenv("DSPARK_CONFIDENCE_HEAD", "off")
    assert "leave it out" in refusal(lambda: resolve(draft=pairs.dspark))
