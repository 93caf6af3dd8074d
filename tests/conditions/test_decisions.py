"""Conditions from public reports that are decided without a model: what to draft, what to verify, when to stop."""

import numpy as np
import pytest
import torch

from sglang_dspark.engine.policy import load_policy
from sglang_dspark.engine.scheduler import PROBE_STEPS
from sglang_dspark.kernels import allocate
from sglang_dspark.schedule import plan_joint
from tests.conditions.simulate import MACHINES, Simulated, throughput
from tests.unit.test_budget import bound, even
from tests.unit.test_step_scheduler import batch, scheduler, shown_at, step


@pytest.mark.parametrize("machine", ("GPU", "CPU", "dear draft"))
@pytest.mark.parametrize("users", (1, 4, 8, 32))
def test_c07_never_slower_than_the_best_fixed_setting_by_more_than_noise(machine, users):
    fixed = [throughput(Simulated(MACHINES[machine], users, fixed=depth)) for depth in range(6)]
    assert throughput(Simulated(MACHINES[machine], users)) > 0.97 * max(fixed)


def test_c08_a_flat_cost_curve_verifies_all():
    plan = plan_joint(even(8, 5, 0.7), bound(seconds=(0.01, 0.01)), max_depth=5)
    assert (plan.mode, plan.depth, plan.budget) == ("verify_all", 5, 40)


def test_c08_a_steep_cost_curve_drafts_nothing():
    plan = plan_joint(even(8, 5, 0.7), bound(seconds=(0.001, 1.0)), max_depth=5)
    assert (plan.mode, plan.depth, plan.budget) == ("no_draft", 0, 0)
    assert plan.tau == 8


def test_c09_the_same_batch_at_1k_and_at_64k_of_context_gets_different_budgets():
    confidence = np.random.default_rng(3).beta(3, 1, (8, 5)).astype(np.float32)
    # Attention over 64k tokens a request dominates the step, so that a draft token more costs little beside it.
    terms = {"tokens": (8, 48), "seconds": (0.010, 0.040), "per_kv_token": 2e-7}
    short = plan_joint(confidence, bound(kv_tokens=8 * 1024, **terms), max_depth=5)
    long = plan_joint(confidence, bound(kv_tokens=8 * 65536, **terms), max_depth=5)
    assert long.budget > short.budget


def test_c12_a_budget_that_is_forced_while_there_is_no_table_is_the_one_used():
    it = scheduler()
    it.cost = None
    policy = load_policy("tests.engine.policies:Half", it)
    described = batch(4)
    plan = policy.plan(described, None)
    confidence = it.confidence(shown_at(0.9, 4, plan.depth), described)
    lens = policy.allocate(plan, confidence, torch.zeros(4, plan.depth, dtype=torch.int64))
    assert int(lens.sum()) - 4 == 4 * it.gamma // 2


BAD = {"nan": np.nan, "inf": np.inf, "minus inf": -np.inf, "negative": -0.99, "above one": 2.0}


@pytest.mark.parametrize("name", BAD)
def test_c13_a_row_of_bad_confidence_costs_itself_and_nobody_else(name):
    confidence = np.random.default_rng(1).uniform(0.9, 0.99, (8, 7)).astype(np.float32)
    cost = bound(tokens=(8, 64), seconds=(0.01, 0.02))
    clean = plan_joint(confidence, cost, max_depth=7, min_gain=0.0)
    confidence[3] = BAD[name]
    plan = plan_joint(confidence, cost, max_depth=7, min_gain=0.0)
    certain = name in ("above one", "inf")  # both count as 1
    assert clean.budget == 56 and plan.budget == (56 if certain else 49)
    rows, prior = torch.arange(8), torch.zeros(7)
    lens = allocate(torch.from_numpy(confidence), rows, prior, torch.tensor(plan.budget)).verify_lens
    assert lens.tolist() == [8, 8, 8, 8 if certain else 1, 8, 8, 8, 8]


@pytest.mark.parametrize("acceptance", (0.70, 0.84))
def test_c18_good_acceptance_that_does_not_pay_ends_with_no_draft_at_all(acceptance):
    """Each token of a step costs as if decoded alone, and drafting comes on top: no acceptance makes up for it."""
    it, rng = scheduler(fixed_ms=0.1, token_ms=3.0, draft_ms=2.0), np.random.default_rng(0)
    plans = [step(it, acceptance, lambda n: int((rng.random(n) < acceptance).cumprod().sum()))[0] for _ in range(600)]
    assert sum(plan.depth > 0 for plan in plans[100:]) < 10  # probes
    assert it.info()["rest_steps"] > 400


@pytest.mark.parametrize("acceptance, slowdown", ((0.70, 3.2), (0.84, 4.5)))
def test_c18_an_overhead_that_the_cost_left_out_is_found_out_while_serving(acceptance, slowdown):
    """The table says that verifying is all but free; a step that verifies anything takes far longer than one that does
    not, and longer than its drafts are worth: 2.8 and 3.6 tokens a step."""
    it, rng = scheduler(fixed_ms=10.0, token_ms=0.01), np.random.default_rng(0)
    plans = []
    for _ in range(800):
        plan, _ = step(
            it,
            acceptance,
            lambda n: int((rng.random(n) < acceptance).cumprod().sum()),
            takes=lambda plan, tokens: 0.010 * slowdown if plan.depth else 0.010,
        )
        plans.append(plan)
    assert it.guard.mode == "no_draft" and sum(plan.depth > 0 for plan in plans[600:]) < 20  # trials


def test_c20_drafts_that_are_never_accepted_end_in_a_rest_and_are_tried_again():
    it = scheduler(draft_ms=2.0, token_ms=1.0)
    plans = [step(it, 0.5, lambda n: 0)[0] for _ in range(1000)]
    assert plans[100].depth == 0
    assert 1 <= sum(plan.depth > 0 for plan in plans[100:]) < 20
    assert it.info()["rest_steps"] > 700
    back = [step(it, 0.5, lambda n: n)[0] for _ in range(6 * PROBE_STEPS)]
    assert back[-1].depth > 0


def test_c20_a_resting_draft_costs_no_more_than_two_percent():
    it = Simulated(MACHINES["dear draft"], 8, acceptance=0.02)
    none = throughput(Simulated(MACHINES["dear draft"], 8, acceptance=0.02, fixed=0))
    throughput(it, steps=300)  # the window in which it is found out
    assert throughput(it) > 0.98 * none
