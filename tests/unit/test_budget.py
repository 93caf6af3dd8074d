"""The planner: the optimum of brute force, and the shapes of cost curve for which the right answer is known."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.kernels import allocate
from sglang_dspark.schedule import Plan, plan_budget, plan_causal, plan_joint, survival


class Stairs:
    """Step time that is constant up to each tier, as a planner's StepTime."""

    def __init__(self, tiers: np.ndarray, seconds: np.ndarray, depth_seconds: np.ndarray) -> None:
        self.tiers, self.seconds, self.depth_seconds = tiers, seconds, depth_seconds

    def __call__(self, depth, tokens):
        return self.depth_seconds[depth] + self.seconds[self.tiers.searchsorted(tokens)]

    def edges(self, first: int, last: int):
        low, high = self.tiers.searchsorted((first, last))
        return self.tiers[low:high]


def brute_force(confidence: np.ndarray, step_time, max_depth: int) -> dict[tuple[int, int], float]:
    """theta of every depth and budget, one at a time."""
    requests, thetas = len(confidence), {}
    for depth in range(max_depth + 1):
        ordered = sorted(survival(confidence[:, :depth]).ravel().tolist(), reverse=True)
        seconds = step_time(depth, np.arange(requests, requests + len(ordered) + 1)).tolist()
        for budget, tau in enumerate(accumulate(ordered, initial=float(requests))):
            thetas[depth, budget] = tau / seconds[budget]
    return thetas


def random_case(rng: np.random.Generator):
    """A small batch under a random cost: steep, flat or stepped, with ties, zeros and ones among the confidences."""
    requests, gamma = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    confidence = rng.random((requests, gamma)).astype(np.float32)
    if rng.random() < 0.3:
        confidence = np.round(confidence * 4) / np.float32(4)
    most = requests * (gamma + 1)
    tiers = np.unique(np.append(rng.integers(1, most + 1, rng.integers(1, 8)), most))
    if rng.random() < 0.3:
        tiers = np.arange(1, most + 1)
    seconds = np.cumsum(rng.exponential(rng.choice([0.001, 0.1, 1.0]), len(tiers))) + rng.random() + 1e-3
    depth_seconds = np.concatenate([[0.0], np.cumsum(rng.exponential(rng.choice([0.001, 0.1]), gamma))])
    return confidence, Stairs(tiers, seconds, depth_seconds), gamma


def check_against_brute_force(cases: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(cases):
        confidence, stairs, gamma = random_case(rng)
        dense = lambda depth, tokens: stairs(depth, tokens)  # noqa: B023, E731 (used within the iteration)
        thetas = brute_force(confidence, stairs, gamma)
        for step_time in (stairs, dense):
            joint = plan_joint(confidence, step_time, max_depth=gamma, min_gain=0.0)
            assert joint.theta == pytest.approx(max(thetas.values()), rel=1e-12)
            assert joint.theta == pytest.approx(thetas[joint.depth, joint.budget], rel=1e-12)
            alone = plan_budget(confidence, step_time, depth=gamma, min_gain=0.0)
            best = max(theta for (depth, _), theta in thetas.items() if depth == gamma)
            assert alone.theta == pytest.approx(best, rel=1e-12)
            assert alone.theta == pytest.approx(thetas[gamma, alone.budget], rel=1e-12)
            assert joint.tau / joint.step_time == pytest.approx(joint.theta)


def test_the_optimum_is_brute_forces_on_random_small_cases():
    check_against_brute_force(1_000, seed=1)


@pytest.mark.long
def test_the_optimum_is_brute_forces_on_ten_thousand_random_small_cases():
    check_against_brute_force(10_000, seed=2)


def server_case(rng: np.random.Generator):
    """A batch of serving size under a cost of GPU shape: linear, roofline or convex, in tiers evenly or not."""
    requests, gamma = int(rng.choice([1, 8, 33, 128])), int(rng.choice([1, 3, 7]))
    spread = rng.choice([1, 2, 8]) * rng.random((requests, 1)) + 0.5
    confidence = rng.beta(spread, 1, (requests, gamma)).astype(np.float32)
    most, count = requests * (gamma + 1), int(rng.choice([4, 16, 48]))
    space = np.linspace if rng.random() < 0.5 else np.geomspace
    tiers = np.unique(np.append(space(requests, most, count).astype(int), most))
    slope = 10 ** rng.uniform(-7, -4)
    linear = 0.01 + slope * tiers
    shapes = [
        linear,
        np.maximum(0.01 + 0.1 * slope * tiers, 0.007 + 1.5 * slope * tiers),
        0.01 + slope * tiers**2 / most,
    ]
    forward = 10 ** rng.uniform(-4, -3)
    return confidence, Stairs(tiers, shapes[rng.integers(3)], forward * np.arange(gamma + 1)), gamma


def ruled(confidence: np.ndarray, step_time: Stairs, gamma: int, min_gain: float) -> tuple[str, float]:
    """Mode and theta that the rule of minimum gain asks for, by full evaluation."""
    thetas = []
    for depth in range(gamma + 1):
        ordered = np.sort(survival(confidence[:, :depth]).ravel())[::-1].astype(np.float64)
        tau = len(confidence) + np.append(0.0, np.cumsum(ordered))
        thetas.append(tau / step_time(depth, len(confidence) + np.arange(len(tau))))
    none, everything = thetas[0][0], max(theta[-1] for theta in thetas[1:])
    mode, theta = ("verify_all", everything) if everything > none * (1 + min_gain) else ("no_draft", none)
    best = max(theta.max() for theta in thetas)
    return ("scheduled", best) if best > theta * (1 + min_gain) else (mode, theta)


def test_batches_of_serving_size_get_what_the_rule_asks_for():
    rng, modes = np.random.default_rng(7), set()
    for _ in range(200):
        confidence, stairs, gamma = server_case(rng)
        for min_gain in (0.0, 0.01):
            plan = plan_joint(confidence, stairs, max_depth=gamma, min_gain=min_gain)
            mode, theta = ruled(confidence, stairs, gamma, min_gain)
            assert plan.theta == pytest.approx(theta, rel=1e-12)
            if min_gain:
                assert plan.mode == mode
            modes.add(plan.mode)
    assert modes == {"no_draft", "verify_all", "scheduled"}


def test_a_batch_of_the_same_size_with_other_tiers_or_prefill_is_planned_afresh():
    confidence = np.random.default_rng(9).beta(2, 2, (8, 5)).astype(np.float32)
    for tiers in ((8, 16, 48, 96), (8, 20, 48, 96), (8, 24, 48, 96)):
        table = CostTable(tiers, (0.010, 0.011, 0.030, 0.050), tiers=tiers)
        for prefill in (0, 2):
            plan = plan_joint(confidence, CostModel(table).bind(16, 0), max_depth=5, prefill_tokens=prefill)
            assert 8 + prefill + plan.budget == tiers[1]


def bound(*, tokens=(1, 1024), seconds=(0.01, 0.02), requests=8, kv_tokens=0, prefill=0, **terms):
    return CostModel(CostTable(tokens, seconds, **terms)).bind(requests, kv_tokens, prefill)


def even(requests: int, gamma: int, value: float) -> np.ndarray:
    return np.full((requests, gamma), value, np.float32)


def test_dear_draft_steps_lower_the_depth_and_not_only_the_budget():
    free = plan_joint(even(8, 5, 0.7), bound(), max_depth=5)
    dear = plan_joint(even(8, 5, 0.7), bound(draft_fixed=0.003), max_depth=5)
    assert free.depth == 5 and 1 <= dear.depth < 5


def test_a_staircase_fills_its_tier():
    rng = np.random.default_rng(0)
    confidence = rng.beta(2, 2, (8, 5)).astype(np.float32)
    table = CostTable((8, 16, 24, 48), (0.010, 0.011, 0.020, 0.050), tiers=(8, 16, 24, 48))
    plan = plan_joint(confidence, CostModel(table).bind(8, 0), max_depth=5)
    assert 8 + plan.budget == 16


def test_the_global_optimum_lies_beyond_a_step_that_does_not_pay_by_itself():
    # 9 tokens cost more than they bring, 16 tokens bring more than they cost: theta has two peaks.
    stairs = Stairs(np.array([8, 16]), np.array([1.0, 1.5]), np.zeros(2))
    plan = plan_joint(even(8, 1, 0.9), stairs, max_depth=1)
    assert plan.budget == 8
    assert plan_causal(even(8, 1, 0.9), stairs, depth=1).budget == 0


def test_prefill_tokens_in_the_step_are_paid_for():
    table = CostTable((8, 48, 56, 96), (0.010, 0.010, 0.011, 0.2))
    confidence = even(8, 5, 0.8)
    assert plan_joint(confidence, CostModel(table).bind(8, 0), max_depth=5).budget == 40
    mixed = CostModel(table).bind(8, 0, prefill_tokens=48)
    assert plan_joint(confidence, mixed, max_depth=5).budget < 40
    unaware = CostModel(table).bind(64, 0)  # large enough a curve; the planner adds the tokens
    assert plan_joint(confidence, unaware, max_depth=5, prefill_tokens=48).budget < 40


def test_within_the_minimum_gain_the_simpler_mode_wins():
    confidence = even(8, 2, 0.9)
    confidence[0] = 0.0  # verify-all wastes two tokens of sixteen, at a cost of a thousandth each
    cost = bound(tokens=(8, 24), seconds=(0.01, 0.01016))
    exact = plan_joint(confidence, cost, max_depth=2, min_gain=0.0)
    assert exact.mode == "scheduled"
    assert plan_joint(confidence, cost, max_depth=2).mode == "verify_all"
    assert plan_budget(confidence, cost, depth=2).mode == "verify_all"
    # And toward no draft: a gain of a few thousandths is no reason to draft.
    level = bound(tokens=(8, 16), seconds=(0.01, 0.018))
    assert plan_joint(even(8, 1, 0.805), level, max_depth=1, min_gain=0.0).budget > 0
    assert plan_joint(even(8, 1, 0.805), level, max_depth=1).mode == "no_draft"


def test_new_requests_count_with_the_prior_and_not_as_certain():
    prior = np.array([0.3, 0.3, 0.3], np.float32)
    cost = bound(tokens=(8, 32), seconds=(0.01, 0.03))
    assert plan_joint(np.tile(prior, (8, 1)), cost, max_depth=3).mode == "no_draft"
    assert plan_joint(even(8, 3, 1.0), cost, max_depth=3).mode == "verify_all"


# Appendix A of the paper: SPS 1, .5, .45 for 1, 2, 3 tokens; c_1 = .8; target (.7, .3), draft (.5, .5). The second
# token's confidence depends on which first token was sampled: 1 after token 0, 0 after token 1.
SPS = np.array([1.0, 0.5, 0.45])


def output_distribution(plan) -> np.ndarray:
    """Distribution of the first output token when `plan(confidence, step_time)` decides what is verified."""
    target, draft = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    result = np.zeros(2)
    for token, second in ((0, 1.0), (1, 0.0)):
        decided: Plan = plan(np.array([[0.8, second]], np.float32), lambda _, tokens: 1.0 / SPS[tokens - 1])
        if decided.budget == 0:
            result += draft[token] * target
            continue
        accept = min(1.0, target[token] / draft[token])
        residual = np.maximum(target - draft, 0)
        result[token] += draft[token] * accept
        result += draft[token] * (1 - accept) * residual / residual.sum()
    return result


def test_the_causal_planner_keeps_the_targets_distribution_in_appendix_a():
    causal = output_distribution(lambda confidence, cost: plan_causal(confidence, cost, depth=2))
    assert causal == pytest.approx([0.7, 0.3])


def test_without_the_early_stop_appendix_a_is_biased():
    search = output_distribution(lambda confidence, cost: plan_budget(confidence, cost, depth=2, min_gain=0.0))
    assert search == pytest.approx([0.85, 0.15])


def admissions_that_look_ahead(plan, cases: int) -> int:
    """How often the admission of a position changes with the confidence after it, which its sampled token decides."""
    rng, changed = np.random.default_rng(5), 0

    def admitted(confidence: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        budget = plan(confidence, lambda _, tokens: seconds[tokens]).budget
        rows, prior = torch.arange(len(confidence)), torch.zeros(4)
        return allocate(torch.from_numpy(confidence), rows, prior, torch.tensor(budget)).verify_lens.numpy() - 1

    for _ in range(cases):
        confidence = rng.random((4, 4)).astype(np.float32)
        seconds = np.cumsum(rng.exponential(0.3, 21)) + 1.0
        request, position = rng.integers(0, 4), rng.integers(0, 3)
        other = confidence.copy()
        other[request, position + 1 :] = rng.random(3 - position)
        before, after = admitted(confidence, seconds)[request], admitted(other, seconds)[request]
        changed += (before > position) != (after > position)
    return changed


def test_the_causal_planner_admits_without_looking_at_what_a_token_decides():
    assert admissions_that_look_ahead(lambda c, cost: plan_causal(c, cost, depth=4), 400) == 0


def test_the_global_search_does_look_ahead():
    assert admissions_that_look_ahead(lambda c, cost: plan_budget(c, cost, depth=4, min_gain=0.0), 400) > 0
