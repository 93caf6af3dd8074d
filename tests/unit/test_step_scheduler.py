"""The step scheduler: what it plans from what it learnt, and that a slot's next request inherits nothing."""

import numpy as np
import pytest
import torch

from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler, spread, tokens_sent
from sglang_dspark.schedule import Plan
from tests.unit.closed_loop import drive, shown_at

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


def step(it, top, accepted_of, described=None, takes=None):
    """One step with top probability ``top`` everywhere; accepted_of(l) drafts of l verified are accepted."""
    described = described or batch()
    requests = len(described.slots)
    plan, verified, _ = drive(
        it,
        described,
        shown_at(top, requests),
        lambda depth: shown_at(top, requests, depth),
        lambda verified: np.array([accepted_of(int(n)) for n in verified]),
        takes,
    )
    return plan, 1 + verified


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


def planned(depth, budget):
    return Plan(depth, budget, "scheduled", 1.0, 1.0, 1.0)


def launch(it, described, top):
    plan = it.plan(described, None)
    seen = shown_at(top, len(described.slots), GAMMA)
    return it.launched(described, plan, seen, it.confidence(seen, described), 0)


def test_a_step_is_planned_from_outcomes_that_are_there_and_not_from_steps_still_in_flight():
    it = scheduler()
    prior = it._prior_rows(np.zeros(3, int))
    first, second = (launch(it, batch(), top) for top in (0.9, 0.4))
    assert (it.history.lookup(9, np.arange(3), np.full(3, 1), prior)[1] == -1).all()
    nothing, all_seen = np.zeros(3, np.int64), np.full(3, GAMMA)
    it.settle(first, all_seen, all_seen)
    high, _ = it.history.lookup(9, np.arange(3), np.full(3, 1), prior)
    it.settle(second, nothing, all_seen)
    low, _ = it.history.lookup(9, np.arange(3), np.full(3, 1), prior)
    assert (high > (0.9 + prior) / 2 - 0.1).all() and (low < high - 0.1).all()


def test_an_outcome_that_comes_after_its_slot_was_given_away_is_not_taken_for_the_next_requests():
    it = scheduler()
    late = launch(it, batch(generation=1), 0.9)
    launch(it, batch(generation=2), 0.9)
    it.settle(late, np.zeros(3, np.int64), np.full(3, GAMMA))
    _, remap = it.history.lookup(9, np.arange(3), np.full(3, 2), it._prior_rows(np.zeros(3, int)))
    assert (remap == -1).all() and not it.estimator.recent(batch(generation=2).rows).any()


def test_what_a_step_showed_is_kept_although_the_next_draft_overwrites_it():
    it = scheduler()
    shown = shown_at(0.9, 3, GAMMA).clone()
    sent = it.launched(batch(), it.plan(batch(), None), shown, it.confidence(shown, batch()), 0)
    shown.fill_(-9.0)
    settled = it.settle(sent, np.zeros(3, np.int64), np.full(3, GAMMA))
    assert (sent.sent.read()[0] > 0).all() and (settled.confidence > 0.7).all()


def test_nothing_is_learnt_from_the_step_after_a_requests_end():
    it = scheduler()
    before = it.priors[0].values().copy(), it.estimator.coefficients.copy()
    for _ in range(20):
        it.settle(launch(it, batch(), 0.9), np.zeros(3, np.int64), np.full(3, GAMMA), np.zeros(3, bool))
    assert np.array_equal(before[0], it.priors[0].values()) and np.array_equal(before[1], it.estimator.coefficients)


@pytest.mark.parametrize("value", (0.0, 1e-30, float("nan"), -1.0, 0.5))
def test_the_whole_budget_is_spent_whatever_the_confidence(value):
    it = scheduler()
    confidence = torch.full((5, GAMMA), value)
    confidence[1] = 0.9
    for budget in (0, 1, 7, 5 * GAMMA, 100):
        plan = planned(GAMMA, budget)
        lens = it.allocate(plan, confidence)
        assert int(lens.sum()) == tokens_sent(plan, 5) and lens.max() <= GAMMA + 1
        assert lens[1] == min(1 + budget, GAMMA + 1)


@pytest.mark.parametrize("depth, budget", [(0, 0), (3, 0), (3, 4), (3, 15), (3, 99)])
def test_a_failed_allocation_spends_as_much_as_the_plan_said(depth, budget):
    plan = planned(depth, budget)
    lens = spread(plan, 5, torch.device("cpu"))
    assert int(lens.sum()) == tokens_sent(plan, 5) and lens.min() >= 1 and lens.max() <= depth + 1


@pytest.mark.parametrize("left", (-1, 0, 1, 2, 3, GAMMA, GAMMA + 1, 1000))
def test_nothing_is_drafted_that_no_request_can_give_any_more(left):
    it = scheduler()
    for _ in range(50):
        step(it, 0.95, lambda n: n)
    plan = it.plan(batch()._replace(left=np.full(3, left)), shown_at(0.95, 3))
    assert plan.depth == max(0, min(left - 1, GAMMA))


def test_the_budget_goes_to_requests_that_can_use_it():
    it = scheduler()
    confidence = torch.full((3, GAMMA), 0.5)
    confidence[0] = 0.9
    ending = batch()._replace(left=np.array([2, 1, 1000]))
    for depth, budget, lens in ((GAMMA, 3, [2, 1, 3]), (GAMMA, 5, [2, 1, 5]), (2, 3, [2, 1, 3]), (0, 0, [1, 1, 1])):
        plan = planned(depth, budget)
        assert it.allocate(plan, it.usable(confidence, plan, ending)).tolist() == lens
    whole = planned(GAMMA, 3 * GAMMA)  # what was planned is spent all the same, and the target is given what it expects
    assert it.allocate(whole, it.usable(confidence, whole, ending)).tolist() == [1 + GAMMA] * 3
    assert (confidence[0] == 0.9).all()  # as the step goes by it, and as it is remembered
    assert it.usable(confidence, plan, batch()) is confidence
