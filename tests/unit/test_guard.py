"""The guard in a closed loop: it finds what is faster than the plans promise, costs little, and comes back."""

import numpy as np
import pytest

from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.schedule import Guard, Plan, plan_simple
from sglang_dspark.schedule.guard import EVERY, LONGEST
from tests.unit.closed_loop import BELIEVED, GAMMA, Loop


def drafting_is_slower_by(factor):
    """What a cost model that left something out does not know: every step with a draft takes longer."""
    return lambda plan: factor if plan.depth else 1.0


def switches(loop):
    return [(it.mode, it.reason) for it in loop.scheduler.guard.take_switches()]


@pytest.mark.parametrize("requests, shows", [(1, 0.95), (8, 0.8)])
def test_almost_no_acceptance_ends_within_two_percent_of_plain_decoding(requests, shows):
    loop = Loop(requests, accept=0.02)
    loop.shows = shows  # a draft as sure of itself as ever
    loop.run(600)
    assert loop.run(800) > 0.98 * loop.rate(0)


def test_good_acceptance_and_still_slower_turns_drafting_off_and_on_again():
    # One seed in thirty, 0 among them, comes back to a depth of 1 and stays: prices of deeper steps, learnt while those
    # were slow, are asked again by a probe in 128 steps only.
    loop = Loop(8, accept=0.8, speed=drafting_is_slower_by(3.0), seed=1)
    assert loop.rate(0) > max(loop.rate(depth) for depth in range(1, GAMMA + 1))
    loop.run(400)
    assert loop.scheduler.guard.mode == "no_draft" and switches(loop)[0] == ("no_draft", "time")
    loop.run(200)  # the first trials come soon after
    assert loop.run(1000) > 0.95 * loop.rate(0)
    assert sum(not plan.depth for plan in loop.plans[-1000:]) > 970
    loop.speed = drafting_is_slower_by(1.0)
    loop.run(LONGEST + 200)
    assert loop.run(400) > 0.9 * max(loop.rate(depth) for depth in range(GAMMA + 1))


def test_it_comes_back_when_acceptance_does():
    loop = Loop(8, accept=0.02)
    loop.shows = 0.8
    loop.run(600)
    loop.accept = 0.9
    loop.run(LONGEST + 200)
    assert loop.run(200) > 0.95 * loop.rate(GAMMA)


@pytest.mark.parametrize("gamma, accept, extend", [(1, 0.1, 2.2e-3), (1, 0.15, 3e-3), (3, 0.05, 3e-3), (5, 0.05, 3e-3)])
def test_it_comes_back_whatever_depth_is_planned_and_whatever_the_extend_costs(gamma, accept, extend):
    """Tokens that are all but free and a dear extend: a plan then drafts to the end, and a rest is still better."""
    table = CostTable(tokens=(1, 64), seconds=(10e-3, 10.1e-3), draft_fixed=1e-5, extend_fixed=extend)
    loop = Loop(4, accept, gamma=gamma, table=table)
    loop.shows = 0.3
    loop.run(2 * LONGEST)
    loop.accept = 0.9
    loop.run(LONGEST + 200)
    assert loop.run(200) > 0.95 * loop.rate(gamma)


@pytest.mark.parametrize("requests, accept", [(1, 0.9), (8, 0.6)])
def test_where_the_plans_are_right_it_changes_nothing_and_costs_next_to_nothing(requests, accept):
    guarded, free = Loop(requests, accept), Loop(requests, accept)
    free.scheduler.guard.choose = lambda plan, *_: plan
    rates = guarded.run(800), free.run(800)
    assert switches(guarded) == []
    tried = sum(plan.mode == "no_draft" for plan in guarded.plans)
    assert tried < 30 and rates[0] > 0.97 * rates[1]


def test_verify_all_is_taken_where_cutting_is_what_costs():
    # A ragged step that takes twice as long as the same tokens in full rows.
    loop = Loop(8, 0.7, lambda plan: 2.0 if plan.mode == "scheduled" else 1.0)
    low = np.array([0.9, 0.9, 0.9, 0.9, 0.3, 0.3, 0.2, 0.1])
    loop.hits_of = lambda random: random.random((8, GAMMA)) < low[:, None]
    loop.run(1000)
    assert np.mean([plan.mode == "scheduled" for plan in loop.plans[-300:]]) < 0.1


def test_without_step_times_nothing_is_tried():
    guard = Guard()
    plan = Plan(3, 9, "scheduled", 8.0, 0.01, 800.0)
    others = Plan(0, 0, "no_draft", 4.0, 0.008, 500.0), Plan(3, 12, "verify_all", 8.2, 0.0105, 780.0)
    for _ in range(5000):
        assert guard.choose(plan, 4, lambda: others) is plan
        guard.observe(plan, 8, float("nan"))
    assert guard.take_switches() == []


def test_alternatives_are_computed_seldom():
    guard, asked = Guard(), []
    plan = Plan(0, 0, "no_draft", 4.0, 0.01, 400.0)
    others = plan, Plan(1, 4, "verify_all", 4.1, 0.02, 205.0)

    def alternatives():
        asked.append(1)
        return others

    for _ in range(400):
        guard.choose(plan, 4, alternatives)
    assert len(asked) <= 400 // EVERY + 1


def test_the_simple_plans_are_no_draft_and_the_best_of_the_whole_depths():
    random = np.random.default_rng(3)
    cost = CostModel(BELIEVED, max_depth=GAMMA)
    for _ in range(200):
        requests = int(random.integers(1, 40))
        confidence = random.random((requests, GAMMA)).astype(np.float32)
        bound = cost.bind(requests, 100)
        none, everything = plan_simple(confidence, bound, max_depth=GAMMA)
        products = np.cumprod(confidence.astype(float), 1)
        theta = [
            (requests + products[:, :g].sum()) / float(bound(g, np.array([requests * (1 + g)]))[0])
            for g in range(GAMMA + 1)
        ]
        assert none.mode == "no_draft" and none.theta == pytest.approx(theta[0])
        assert everything.theta == pytest.approx(max(theta[1:]), rel=1e-5)
        assert everything.budget == requests * everything.depth and everything.mode == "verify_all"
