"""The step scheduler: what it plans from what it learnt, and that a slot's next request inherits nothing."""

import numpy as np
import pytest
import torch

from sglang_dspark.confidence import draft_features
from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler

GAMMA = 4


def batch(requests=3, generation=1, rule=0):
    rows = np.arange(requests)
    return StepBatch(rows, np.full(requests, generation), np.full(requests, rule), np.ones(requests, bool), 100)


def scheduler(*, token_ms=0.01, draft_ms=0.01, fixed_ms=10.0):
    it = StepScheduler(slots=8, gamma=GAMMA)
    counts = (1, 64)
    times = tuple((fixed_ms + token_ms * t) / 1e3 for t in counts)
    it.cost = CostModel(CostTable(tokens=counts, seconds=times, draft_fixed=draft_ms / 1e3), max_depth=GAMMA)
    return it


def shown_at(top, *shape):
    """What a draft shows whose best of three tokens has probability ``top``, the others alike; [*shape, features]."""
    rest = (1 - top) / 2
    return draft_features(torch.tensor([top, rest, rest]).log()[None])[0].expand(*shape, -1)


def step(it, top, accepted_of, described=None):
    """One step with top probability ``top`` everywhere; accepted_of(l) drafts of l verified are accepted."""
    described = described or batch()
    requests = len(described.slots)
    plan = it.plan(described, shown_at(top, requests))
    seen = shown_at(top, requests, plan.depth)
    confidence = it.confidence(seen, described)
    lens = it.allocate(plan, confidence)
    it.launched(described, plan, seen, confidence, lens, int(lens.sum()))
    it.settle(np.array([accepted_of(int(n) - 1) for n in lens]))
    return plan, lens


def test_without_a_profile_everything_drafted_is_verified():
    it = scheduler()
    it.cost = None
    plan, lens = step(it, 0.9, lambda n: n)
    assert plan.mode == "verify_all" and lens.tolist() == [1 + GAMMA] * 3


def test_cheap_tokens_and_good_drafts_are_all_verified():
    it = scheduler()
    for _ in range(50):
        plan, lens = step(it, 0.95, lambda n: n)
    assert plan.depth == GAMMA and lens.tolist() == [1 + GAMMA] * 3


def test_a_slots_next_request_starts_from_the_prior():
    it = scheduler()
    step(it, 0.05, lambda n: 0, batch(generation=1))
    mine, _ = it.history.lookup(it._step + 1, np.arange(3), np.full(3, 1), it._prior_rows(np.zeros(3, int)))
    other, remap = it.history.lookup(it._step + 1, np.arange(3), np.full(3, 2), it._prior_rows(np.zeros(3, int)))
    assert remap.tolist() == [-1] * 3
    assert (mine[:, 0] < other[:, 0]).all()


def test_greedy_and_sampled_requests_are_learnt_apart():
    it = scheduler()
    for _ in range(40):
        step(it, 0.7, lambda n: n, batch(rule=0))
        step(it, 0.7, lambda n: 0, batch(rule=1))
    greedy, sampled = (it.confidence(shown_at(0.7, 1, 1), batch(1, 2, rule))[0, 0] for rule in (0, 1))
    assert greedy > 0.8 and sampled < 0.3


def test_counters_add_up():
    it = scheduler()
    for n in range(10):
        step(it, 0.8, lambda verified, n=n: min(verified, n % 3))
    info = it.info()
    assert info["steps"] == 10 and info["requests"] == 30
    assert info["target_tokens"] == info["requests"] + info["verified"]
    assert info["produced"] == info["requests"] + info["accepted"]
    assert info["accepted_length"] == pytest.approx(info["produced"] / info["requests"])
