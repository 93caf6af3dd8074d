"""No call of ours makes the host wait for its device between a step's plan and its launch.

Our worker runs whole steps on a pretended device (tests.engine.pretend_device) with models that make up their output;
what SGLang does around them is stood in for, and is not under test.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dspark.confidence import FEATURES, HEAD, HEADLESS, Estimator
from sglang_dspark.confidence.head import HEAD_RULES, ConfidenceHead
from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.clock import StepClock
from sglang_dspark.engine.faults import Faults
from sglang_dspark.engine.metrics import Reports
from sglang_dspark.engine.policy import Policy
from sglang_dspark.engine.requests import RequestTable
from sglang_dspark.engine.scheduler import StepScheduler
from tests.engine.pretend_device import DEVICE, Event, Waited, Watch, on_device, plain
from tests.pretend_request import Request

GAMMA, SLOTS, VOCAB, HIDDEN, REQUESTS = 4, 12, 32, 8, 5


def fill_by_reference(confidence, remap, prior, budget, depth, lens, indptr):
    """The allocation kernel's answer; its launch reads nothing, so neither is this watched."""
    from sglang_dspark.kernels.allocate import allocate

    with torch._C.DisableTorchFunction():
        made = allocate(plain(confidence), plain(remap), plain(prior), int(plain(budget)), depth=depth)
        plain(lens).copy_(made.verify_lens)
        plain(indptr).copy_(made.qo_indptr)


@pytest.fixture
def device(monkeypatch):
    """A GPU's parts that are not there, and SGLang's steps around ours."""
    from sglang.kernels.ops.speculative.ragged_verify_kernels import BuildQoIndptr
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

    from sglang_dspark.engine import verify as ours
    from sglang_dspark.engine import worker

    monkeypatch.setattr("sglang_dspark.kernels.allocate_triton.allocate_triton", fill_by_reference)
    monkeypatch.setattr(BuildQoIndptr, "triton", BuildQoIndptr.torch)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Event))
    monkeypatch.setattr(worker, "run_eagle_verify", verify)
    monkeypatch.setattr(ours, "get_spec", lambda: SimpleNamespace(speculative_use_rejection_sampling=False))
    monkeypatch.setattr(EAGLEWorkerV2, "forward_batch_generation", step)
    monkeypatch.setattr(EagleDraftWorker, "draft", draft)
    monkeypatch.setattr(EagleDraftWorker, "_draft_extend_for_decode", extend)
    return monkeypatch


def outputs(tokens):
    logits = torch.linspace(-3, 3, len(tokens) * VOCAB, device=DEVICE).view(len(tokens), VOCAB)
    hidden = torch.linspace(-1, 1, len(tokens) * HIDDEN, device=DEVICE).view(len(tokens), HIDDEN)
    return SimpleNamespace(next_token_logits=logits, hidden_states=hidden)


def step(worker, batch, on_publish=None, **_):
    depth, requests = worker.speculative_num_steps, len(batch.seq_lens)
    batch.spec_info = SimpleNamespace(draft_probs=None, num_tokens_per_req=depth + 1, prepared_mrope_positions=None)
    if depth:
        worker._draft_worker.draft(batch)
    tokens = requests * (depth + 1)
    for name in ("draft_token", "positions", "prepared_out_cache_loc"):
        setattr(batch.spec_info, name, torch.arange(tokens, device=DEVICE))
    if not depth:  # the last verify's bonus tokens as they are, where nothing relays them
        batch.spec_info.draft_token = batch.spec_info.draft_token.int()
    batch.spec_info.retrieve_next_token = torch.arange(tokens, device=DEVICE).view(requests, depth + 1)
    batch.spec_info.kv_loc_plan = None
    result = worker.verify(batch)
    worker._draft_worker._draft_extend_for_decode(batch, result)
    return result


def draft(self, batch, *, with_topology=False):
    with self._watching(1):
        for _ in range(self.speculative_num_steps - 1):
            self.draft_runner.forward(SimpleNamespace(input_ids=torch.zeros(len(batch.seq_lens), dtype=torch.long,
                                                                            device=DEVICE)))  # fmt: skip


def extend(self, batch, result, *_, **__):
    self.draft_runner.forward(SimpleNamespace(input_ids=batch.seq_lens))
    result.next_draft_input = SimpleNamespace(bonus_tokens=torch.zeros(len(batch.seq_lens), dtype=torch.long,
                                                                       device=DEVICE))  # fmt: skip


def verify(batch, *, target_worker, num_draft_tokens, **_):
    from sglang_dspark.engine.verify import prepare_ragged

    assert batch.spec_info.draft_token.dtype == torch.int64  # SGLang's CUDA kernels check it

    def prepare(info, *_):
        return SimpleNamespace(input_ids=info.draft_token)

    forward_batch = prepare_ragged(prepare, batch.spec_info, None, batch, target_worker)
    output = target_worker.forward_batch_generation(None, forward_batch=forward_batch).logits_output
    assert torch.argmax(output.next_token_logits, dim=-1).shape == (len(batch.seq_lens) * num_draft_tokens,)
    accept = torch.ones(len(batch.seq_lens), dtype=torch.int32, device=DEVICE)
    return SimpleNamespace(accept_lens=accept, num_non_draft_tokens_per_req=1)


class Target:
    """A target worker whose forward is given the compact tokens."""

    model_config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, tiers):
        graphs = SimpleNamespace(ragged_verify_mode=True, capture_num_tokens=tiers, max_bs=8)
        self.model_runner = SimpleNamespace(
            decode_cuda_graph_runner=graphs if tiers else None, model_config=SimpleNamespace(model_is_mrope=False)
        )

    def forward_batch_generation(self, batch, *, forward_batch, **_):
        return SimpleNamespace(logits_output=outputs(forward_batch.input_ids))


def ranks_of_two():
    """The first of two ranks."""
    agreement = Agreement(SimpleNamespace(world_size=2, rank_in_group=0, broadcast=lambda *_, **__: None))
    agreement._broadcast = lambda values: values
    return agreement


def worker_of(plans, head=False, ranks=1, tiers=None):
    """Our worker on the pretended device, which goes through the given (depth, budget) by turn."""
    from sglang_dspark.engine.draft_worker import DepthState, DSparkDraftWorker
    from sglang_dspark.engine.worker import DSparkWorker

    own = DSparkDraftWorker.__new__(DSparkDraftWorker)
    own.speculative_num_steps, own.device = GAMMA, DEVICE
    own.draft_runner = SimpleNamespace(forward=lambda given: SimpleNamespace(logits_output=outputs(given.input_ids)))
    made, rules = None, ()
    if head:
        embed = on_device(torch.randn(VOCAB, HIDDEN))
        weight = torch.randn(len(HEAD_RULES), HIDDEN + HIDDEN + len(FEATURES))
        made, rules = ConfidenceHead(on_device(weight), on_device(torch.zeros(len(HEAD_RULES))), HIDDEN, embed), (0, 1)
    with Watch() if not head else contextlib.nullcontext():
        rows = len(FEATURES) + len(rules)
        own.gamma, own.head, own._position, own._extended = GAMMA, made, None, None
        own.head_rules = on_device(torch.tensor(rules, dtype=torch.long))
        own.shown = on_device(torch.zeros(SLOTS, GAMMA, rows))
        own.first_shown = on_device(torch.zeros(SLOTS, rows))
        own.depths = {depth: DepthState(None, None, None, None, (None, None)) for depth in range(GAMMA + 1)}
        own.draft_runner.forward = own._tap(own.draft_runner.forward)

    it = DSparkWorker.__new__(DSparkWorker)
    it.gamma, it.device, it.faults, it.topk = GAMMA, DEVICE, Faults(), 1
    it.reports = Reports(it.faults, None)
    it.agreement = Agreement(SimpleNamespace(world_size=1)) if ranks == 1 else ranks_of_two()
    it._plan = it._batch = it._launched = it.plan_stream = it.plan_stream_ctx = None
    it._warm, it.clock, it._draft_worker, it._target_worker = True, StepClock(), own, Target(tiers)
    it.req_to_token_pool = it.token_to_kv_pool_allocator = None
    it.requests = RequestTable(SLOTS)
    it.scheduler = StepScheduler(SLOTS, GAMMA, Estimator(SLOTS, GAMMA, HEAD if head else HEADLESS))
    table = CostTable(tokens=(1, 64), seconds=(0.01, 0.02), draft_fixed=0.001)
    it.scheduler.cost = CostModel(table, max_depth=GAMMA)
    it.policy = Policy(it.scheduler)
    turns = iter(plans)

    def plan(batch, first_shown):
        assert first_shown is None  # what the draft showed last can't be read here without waiting
        own_plan = it.scheduler.plan(batch, None)
        depth, budget = next(turns)
        return own_plan if depth is None else own_plan._replace(depth=depth, budget=budget)

    it.policy.plan = plan
    return it


def batch_of():
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    slots = np.arange(2, 2 + REQUESTS)
    return SimpleNamespace(
        forward_mode=mode,
        is_extend_in_batch=False,
        # Some are about to end, and what they cannot give is masked.
        reqs=[Request(int(slot), most=1 + int(slot)) for slot in slots],
        req_pool_indices=on_device(torch.from_numpy(slots)),
        seq_lens=on_device(torch.full((REQUESTS,), 20)),
        seq_lens_sum=None,
        seq_lens_cpu=None,
        forward_iter=1,
        out_cache_loc=None,
        has_grammar=False,
        return_logprob=False,
        sampling_info=SimpleNamespace(
            is_all_greedy=True,
            acc_additive_penalties=None,
            acc_scaling_penalties=None,
            logit_bias=None,
            has_custom_logit_processor=False,
            has_watermark_candidates=False,
            custom_logit_processor=None,
        ),
    )


def run(worker, batch):
    """A step, and the point in the stream that it ends at."""
    with Watch(), torch.no_grad():
        return worker.forward_batch_generation(batch), Event.recorded


def settle(worker, batch, result, end):
    """As SGLang does once its own copies of the outcome have arrived: the device has passed the step's end."""
    Event.passed = end
    result.accept_lens, result.cap_lens = plain(result.accept_lens), plain(result.cap_lens)
    with Watch():
        type(worker).take_outcome(worker, result, batch)


PLANS = [(GAMMA, 7), (GAMMA, GAMMA * REQUESTS), (2, 3), (2, 2 * REQUESTS), (0, 0), (1, 0), (None, None), (GAMMA, 7)]


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("head", (False, True), ids=("estimator", "head"))
@pytest.mark.parametrize("tiers", (None, [GAMMA + 1, 2 * (GAMMA + 1), 4 * (GAMMA + 1)]), ids=("eager", "graphs"))
def test_a_step_is_planned_drafted_allocated_and_sent_without_waiting_for_the_device(device, head, ranks, tiers):
    worker, batch = worker_of(PLANS, head, ranks, tiers), batch_of()
    flying = []
    for _ in PLANS:
        flying.append(run(worker, batch))
        if len(flying) == 2:  # under overlap a step is launched before the one before it settles
            settle(worker, batch, *flying.pop(0))
    settle(worker, batch, *flying.pop())
    assert worker.faults.counts == {}
    info = worker.scheduler.info()
    assert info["steps"] == len(PLANS) and info["verified"] > 20
    sent = info["requests"] + info["verified"]
    assert info["target_tokens"] == sent if tiers is None else info["target_tokens"] > sent
    known = worker.scheduler.history.lookup(99, np.arange(2, 7), np.ones(5, np.int64), np.zeros(GAMMA, np.float32))[1]
    assert (known >= 0).all()


@pytest.mark.parametrize("fault", (False, True), ids=("sound", "fault"))
@pytest.mark.parametrize("drafts", (True, False), ids=("drafted", "no draft"))
def test_a_native_step_is_sent_and_learnt_from_without_waiting_for_what_was_launched_since(device, drafts, fault):
    from sglang_dspark.engine.native.planner import NativePlanner
    from tests.engine.test_native_parts import GAMMA as BLOCK
    from tests.engine.test_native_parts import scheduling

    it, ends = scheduling(token_ms=0.01 if drafts else 100.0), []
    planner = NativePlanner.__new__(NativePlanner)
    planner.scheduling, planner._tp_sync = it, SimpleNamespace(sync=lambda *_: None)
    if fault:
        it.policy.allocate = lambda *_: 1 / 0
    with Watch():
        for _ in range(2):
            it.begin(3)
            if it.plan.depth:
                block = torch.zeros(3, BLOCK)
                it.drafted(on_device(block), on_device(block.long()))
            it.verifies(planner._schedule_verify_lens(device=DEVICE, budget=it.plan.budget, confidence=None))
            it.sent(3, None)
            ends.append(Event.recorded)
        assert (it.plan.depth > 0) == drafts
        Event.passed = ends[0]
        it.outcome(np.zeros(3, np.int64), None)
        assert it.faults.counts == ({"allocation": 2} if fault and drafts else {})
        assert it.scheduler.counters["steps"] == 1
        with pytest.raises(Waited):  # the second is not over
            it.outcome(np.zeros(3, np.int64), None)


def test_a_step_that_left_nothing_to_learn_from_still_counts_as_arrived(device):
    """Else every later outcome would be timed as of the step before it, for as long as the server lives."""
    worker, batch = worker_of(PLANS), batch_of()
    launched = worker.scheduler.launched
    worker.scheduler.launched = lambda *_: 1 / 0
    settle(worker, batch, *run(worker, batch))
    worker.scheduler.launched = launched
    assert worker.faults.counts == {"history": 1} and "steps" not in worker.scheduler.counters
    run(worker, batch)
    assert len(worker.clock._launched) == 1


def test_the_watch_sees_a_step_that_waits(device):
    for spoil in (
        lambda worker, batch: batch.seq_lens.max().item(),
        lambda worker, batch: worker._draft_worker.shown.cpu(),
        lambda worker, batch: worker._launched.sent.read(),
    ):
        worker, batch = worker_of(PLANS), batch_of()
        run(worker, batch)
        with Watch(), pytest.raises(Waited):
            spoil(worker, batch)


@pytest.mark.parametrize("grid", (None, [17]), ids=("eager", "graphs"))
def test_the_layout_is_the_one_that_sglangs_dspark_planner_makes_of_the_same_lengths(device, grid):
    from sglang.srt.speculative.dspark_components.dspark_planner import DSparkVerifyPlanner
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode

    from sglang_dspark.engine.verify import ragged_rows
    from tests.engine.test_ragged import assert_equal

    lens = torch.tensor([1, 5, 3, 5, 3], dtype=torch.int32)
    runner = None if grid is None else SimpleNamespace(ragged_verify_mode=True, capture_num_tokens=grid, max_bs=8)
    planner = SimpleNamespace(
        _ragged_verify_mode=RaggedVerifyMode.COMPACT,
        _is_verify_all=False,
        _budget_aligned_to_graph_tier=lambda **_: None,
        _schedule_verify_lens=lambda **_: lens,
        _dynamic_graph_tier=True,
        _schedule_cfg=SimpleNamespace(min_verify_len=1),
        verify_num_draft_tokens=5,
        model_runner=SimpleNamespace(decode_cuda_graph_runner=runner),
    )
    theirs = DSparkVerifyPlanner.schedule_layout(
        planner,
        req_pool_indices=torch.arange(5),
        prefix_lens=None,
        device=torch.device("cpu"),
        confidence=None,
        budget=12,
    )
    if grid is None:  # with the lengths on the host
        assert_equal(ragged_rows(lens, 5, 17, 5).layout, theirs)
        return
    with Watch():  # with the lengths on the device only
        ours = ragged_rows(on_device(lens), 5, 17, 5, 17).layout
    assert ours.total_verify_tokens == 17  # which their planner leaves out where it could know
    for name in set(type(theirs).__struct_fields__) - {"total_verify_tokens"}:
        mine, other = plain(getattr(ours, name)), getattr(theirs, name)
        assert torch.equal(mine, other) if isinstance(other, torch.Tensor) else mine == other, name
