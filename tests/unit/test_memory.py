"""Memory of ours is bounded by the formulas of docs/memory.md, which are neither too low nor far too high."""

import ast
import re
import tracemalloc
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from sglang_dspark.confidence import FEATURES, HEAD, HEADLESS, Estimator
from sglang_dspark.confidence.head import HEAD_RULES, ConfidenceHead
from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.engine.draft_worker import DSparkDraftWorker
from sglang_dspark.engine.requests import RequestTable
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler
from sglang_dspark.observe.metrics import StepMetrics
from sglang_dspark.observe.trace import record_type
from tests.pretend_request import Request

DOC = (Path(__file__).parents[2] / "docs/memory.md").read_text()
SIZES = [(256, 1), (256, 7), (1024, 16)]
each_size = pytest.mark.parametrize(("slots", "gamma"), SIZES)
each_source = pytest.mark.parametrize("source", (HEADLESS, HEAD), ids=lambda source: source.name)


def stated(what, **values):
    """The formula of the row that begins with ``what``, worked out."""
    ((formula,),) = (re.findall(r"`([^`]+)` \|$", line) for line in DOC.splitlines() if line.startswith(f"| {what}"))
    nodes = {type(node) for node in ast.walk(ast.parse(formula, mode="eval"))}
    assert nodes <= {ast.Expression, ast.BinOp, ast.Add, ast.Mult, ast.Name, ast.Load, ast.Constant}, formula
    return eval(formula, values)


def held(thing, seen=None):
    """Bytes of all arrays and tensors that are reachable through attributes and containers."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        new = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() * new
    if isinstance(thing, np.ndarray):
        return held(thing.base, seen) if isinstance(thing.base, np.ndarray) else thing.nbytes
    inside = list(getattr(thing, "__dict__", {}).values())
    if isinstance(thing, dict):
        inside += [*thing.values()]
    elif isinstance(thing, (list, tuple, set, deque)):
        inside += [*thing]
    return sum(held(part, seen) for part in inside)


def batch(slots):
    rows = np.arange(slots)
    return StepBatch(rows, rows, rows % 2, np.ones(slots, bool), 100 * slots, left=rows + 1)


@each_size
@each_source
def test_history_and_estimates(slots, gamma, source):
    scheduler = StepScheduler(slots, gamma, Estimator(slots, gamma, source))
    bound = stated("history", S=slots, G=gamma)
    assert 0.9 * (bound - 65536) <= held(scheduler) <= bound


def test_a_table_of_requests_through_many_generations():
    slots = 1024
    requests = [[Request(slot) for slot in range(slots)] for _ in range(3)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    table = RequestTable(slots)
    for generation in requests:
        table.describe(SimpleNamespace(reqs=generation, seq_lens_sum=0, forward_iter=1))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    bound = stated("requests", S=slots)
    assert 0.6 * bound <= grown <= bound + 4096


@each_size
def test_curve_of_the_step_cost(slots, gamma):
    cost = CostModel(CostTable(tokens=(1, 64), seconds=(0.01, 0.02)), max_depth=gamma)
    for requests in range(1, slots + 1):  # as a batch that fills up
        cost.bind(requests, 100 * requests)
    assert slots * (gamma + 1) * 8 <= held(cost) <= stated("curve", S=slots, G=gamma)


@each_size
@each_source
def test_a_step_whose_outcome_is_not_known(slots, gamma, source):
    scheduler = StepScheduler(slots, gamma, Estimator(slots, gamma, source))
    plan = scheduler.verify_all(slots)
    columns = len(source.shown)
    shown, confidence = torch.zeros(slots, gamma, columns), torch.zeros(slots, gamma)
    before = held(scheduler)
    sent = scheduler.launched(batch(slots), plan, shown, confidence, slots * (gamma + 1))
    bound = stated("a step whose", S=slots, G=gamma, C=columns)
    assert 0.6 * bound <= held(sent) + held(scheduler) - before <= bound
    scheduler.settle(sent, np.zeros(slots, np.int64), np.full(slots, gamma))
    del sent
    assert held(scheduler) - before < 0.1 * bound


@each_size
def test_what_the_draft_shows_and_its_head(slots, gamma):
    vocab, hidden = 1000, 64
    weight = torch.zeros(len(HEAD_RULES), hidden + hidden + len(FEATURES))
    head = ConfidenceHead(weight, torch.zeros(len(HEAD_RULES)), hidden, torch.zeros(vocab, hidden))
    for given, columns in ((None, len(HEADLESS.shown)), (head, len(HEAD.shown))):
        draft = SimpleNamespace(
            speculative_num_steps=gamma, device="cpu", draft_runner=SimpleNamespace(forward=None),
            _tap=lambda forward: forward, _topk1_parents_prealloc=None, _topk1_score_indices_prealloc=None,
        )  # fmt: skip
        DSparkDraftWorker.start_watching(draft, slots, given, (0, 1) if given else ())
        assert held((draft.shown, draft.first_shown)) == stated("what the draft shows", S=slots, G=gamma, C=columns)
    assert held((head.proj.weight, head.token_logits)) == stated("confidence head", V=vocab, H=hidden)


@each_size
def test_chain_constants_of_every_depth(slots, gamma, monkeypatch):
    from sglang.srt.speculative import base_spec_worker

    graph = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=None))
    monkeypatch.setattr(base_spec_worker, "get_exec", lambda: graph)
    monkeypatch.setattr(base_spec_worker, "get_schedule", lambda: SimpleNamespace(max_running_requests=slots))
    draft = object.__new__(DSparkDraftWorker)
    draft.topk, draft.device, draft.server_args, draft.depths = 1, "cpu", None, {}
    draft.draft_attn_backend = draft.draft_extend_attn_backend = None
    draft.cuda_graph_runner = draft.cuda_graph_runner_for_draft_extend = None
    for depth in range(gamma + 1):
        draft.speculative_num_steps, draft.speculative_num_draft_tokens = depth, depth + 1
        draft._rebuild_topk1_chain_buffers()
        draft.keep_depth()
    bound = stated("chain constants", S=slots, G=gamma)
    assert 0.5 * bound <= held([state.chain for state in draft.depths.values()]) <= bound


@each_size
@each_source
def test_records_of_a_step(slots, gamma, source):
    size = slots * record_type(gamma, len(source.shown)).itemsize
    assert size == stated("a step's records", S=slots, G=gamma, C=len(source.shown))


@pytest.mark.parametrize("gamma", (1, 7, 16))
def test_series_of_the_metrics(gamma):
    registry = CollectorRegistry()
    it = StepMetrics({"model_name": "m"}, gamma, registry=registry)
    random = np.random.default_rng(0)
    for _ in range(50):
        for depth in range(gamma + 1):
            for mode in ("scheduled", "verify_all", "no_draft"):
                it.planned(mode, depth, depth, depth == 0, 1e-5)
            verified = random.integers(0, depth + 1, 400)
            accepted = np.minimum(verified, random.integers(0, depth + 1, 400))
            it.settled(depth, verified, accepted, random.random((400, gamma)), verified >= 0, tokens=400, tau=1.0)
    for part in range(16):  # more parts than can fail
        it.fault(str(part))
    series = sum(not name.endswith("_created") for metric in registry.collect() for name, *_ in metric.samples)
    assert series == len(it._counters) + len(it._gauges) + len(it._children)
    bound = stated("metrics", G=gamma) / 400
    assert 0.6 * bound <= series <= bound


def test_the_example_is_what_the_formulas_give():
    size = {"S": 256, "G": 7, "C": 3, "V": 150_000, "H": 4096}
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `", DOC, re.MULTILINE)
    where = {place: sum(stated(what, **size) for what, at in rows if at == place) for place in ("host", "device")}
    head = stated("confidence head", **size)
    step = stated("a step whose", **size)
    assert f"is {(where['host'] + step) / 1e6:.1f} MB on the host" in DOC
    assert f"{(where['device'] - head) / 1e6:.2f} MB on the device" in DOC
    assert f"adds {head / 1e6:.1f} MB" in DOC
