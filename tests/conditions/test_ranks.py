"""Conditions from public reports on tensor-parallel ranks: their floats differ, their decisions must not."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dspark.config import Options, Refusal
from sglang_dspark.cost import CostKey, CostModel, CostTable
from sglang_dspark.engine import worker as worker_module
from sglang_dspark.engine.faults import Faults
from sglang_dspark.engine.policy import Policy
from sglang_dspark.engine.worker import DSparkWorker
from tests.unit.test_step_scheduler import GAMMA, batch, scheduler, shown_at


class Group:
    """Two ranks in two threads, with as much of SGLang's group as the worker uses."""

    world_size = 2

    def __init__(self):
        self.barrier, self.sent = threading.Barrier(2, timeout=60), None

    def broadcast(self, values, src):
        if rank() == src:
            self.sent = values.clone()
        self.barrier.wait()
        values.copy_(self.sent)
        self.barrier.wait()


def rank() -> int:
    return int(threading.current_thread().name)


@pytest.fixture
def group(monkeypatch):
    it = Group()
    parallel = property(lambda _: rank())
    monkeypatch.setattr(
        worker_module, "get_parallel", lambda: type("Parallel", (), {"tp_group": it, "tp_rank": parallel})()
    )
    return it


def rank_worker() -> DSparkWorker:
    """A worker without models: what decides and what agrees is the real thing."""
    it = object.__new__(DSparkWorker)
    it.device, it.gamma, it.faults, it._warm = "cpu", GAMMA, Faults(), True
    it.scheduler = scheduler()
    table = CostTable((4, 7, 10, 20), (0.010, 0.012, 0.020, 0.060), tiers=(4, 7, 10, 20))  # whose ends cut a batch
    it.scheduler.cost = CostModel(table, max_depth=GAMMA)
    it.policy = Policy(it.scheduler)
    return it


def follow(steps: int, mine: list, own: list) -> None:
    """One rank's decisions: (depth, budget, verify lengths) of each step, and what it would have decided by itself."""
    it, random = rank_worker(), np.random.default_rng(0)
    for number in range(steps):
        top = random.uniform(0.3, 0.99, 4) if number % 2 else np.tile([0.811, 0.810], 2)
        described = batch(4, generation=number // 2)
        it._batch = described
        first = torch.cat([shown_at(float(t), 1) for t in top])
        it._draft_worker = SimpleNamespace(first_shown=first)
        pretend = SimpleNamespace(
            seq_lens=torch.zeros(4), req_pool_indices=torch.arange(4), reqs=[SimpleNamespace(lora_id=None)] * 4
        )
        plan = it._make_plan(pretend)
        shown = first[:, None].expand(-1, plan.depth, -1)
        confidence = it.scheduler.confidence(shown, described)
        if rank():
            row = confidence[number // 2 % 4]
            row.copy_(torch.nextafter(row, torch.full_like(row, number % 3 - 1.0)))  # one ulp up, down, or toward 0
        lens = alone = it.policy.allocate(plan, confidence, torch.zeros(4, plan.depth, dtype=torch.int64))
        lens = it.from_first_rank(lens.clone())
        it.scheduler.launched(described, plan, shown, confidence, lens, int(lens.sum()))
        it.scheduler.settle(np.minimum(random.integers(0, GAMMA + 1, 4), lens.numpy() - 1))
        mine.append((plan.depth, plan.budget, lens.tolist()))
        own.append(alone.tolist())


def check_ranks(steps: int) -> None:
    decisions, alone = ([], []), ([], [])
    threads = [threading.Thread(target=follow, args=(steps, decisions[r], alone[r]), name=str(r)) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(decisions[0]) == steps and decisions[0] == decisions[1]
    assert alone[0] != alone[1], "the ranks would have agreed by themselves, so nothing was tested"


def test_c02_two_ranks_whose_confidences_differ_by_an_ulp_at_the_cut_decide_alike(group):
    check_ranks(300)


@pytest.mark.long
def test_c02_two_ranks_decide_alike_for_ten_thousand_steps(group):
    check_ranks(10_000)


KEY = {f.name: 1 if f.type in ("int", int) else "same" for f in dataclasses.fields(CostKey)}
SETTINGS = [*(("options", f.name) for f in dataclasses.fields(Options)), *(("key", name) for name in KEY)]


@pytest.mark.parametrize("place, name", [*SETTINGS, ("gamma", "num_steps"), ("version", "sglang_dspark")])
def test_c17_a_setting_of_one_rank_only_is_refused_at_start_and_named(monkeypatch, place, name):
    def gathered(other: bool):
        it = object.__new__(DSparkWorker)
        options, key, it.gamma = {}, dict(KEY), 5 if other and place == "gamma" else 4
        if other and place in ("options", "key"):
            (options if place == "options" else key)[name] = "another"
        it.options = dataclasses.replace(Options(), **options)
        version = "another" if other and place == "version" else "1"
        monkeypatch.setattr(worker_module, "__version__", version)
        seen = []
        group = SimpleNamespace(world_size=2, all_gather_object=lambda mine: seen.append(mine) or [mine])
        monkeypatch.setattr(worker_module, "get_parallel", lambda: SimpleNamespace(tp_group=group))
        it._refuse_other_settings(CostKey(**key))
        return seen[0]

    both = [gathered(False), gathered(True)]
    group = SimpleNamespace(world_size=2, all_gather_object=lambda _: both)
    monkeypatch.setattr(worker_module, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    it = object.__new__(DSparkWorker)
    it.gamma, it.options = 4, Options()
    with pytest.raises(Refusal) as refused:
        it._refuse_other_settings(CostKey(**KEY))
    assert f"rank 1 was started with {name} " in str(refused.value) and str(refused.value).endswith(".")
