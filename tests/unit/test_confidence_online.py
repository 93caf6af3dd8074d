"""The online logistic fits: the hierarchical mode they solve for, and what a batch does to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from sglang_dspark.confidence.online import Lean, OnlineLogistic

RULES, GAMMA, D = 2, 3, 2
START = np.array([0.0, 1.0])
LEAN = Lean(np.array([20.0, 40.0]), np.array([40.0, 120.0]))


def fits(half_life: float = np.inf) -> OnlineLogistic:
    start = np.broadcast_to(START, (RULES, GAMMA, D)).copy()
    return OnlineLogistic(start, LEAN, np.full(D, -8.0), np.full(D, 8.0), half_life)


def observations(n: int, seed: int, theta=(0.5, 0.8)):
    rng = np.random.default_rng(seed)
    x = np.column_stack([np.ones(n), rng.normal(0, 1.5, n)])
    rule, position = rng.integers(0, RULES, n), rng.integers(0, GAMMA, n)
    return x, rule, position, rng.random(n) < 1 / (1 + np.exp(-x @ np.array(theta)))


def penalised_loss(deviation: np.ndarray, x, position, accepted) -> float:
    """Of one rule: minus log posterior of [pooled, positions] deviations, the model that online.py describes."""
    pooled, own = deviation[:D], deviation[D:].reshape(GAMMA, D)
    eta = (x * (START + own[position])).sum(axis=1)
    loss = np.logaddexp(0, eta).sum() - eta[accepted].sum()
    lean = (LEAN.pooled / 4 * pooled**2).sum() + (LEAN.position / 4 * (own - pooled) ** 2).sum()
    return loss + lean / 2


def test_batch_after_batch_ends_near_the_posterior_mode_of_all_at_once():
    it = fits()
    x, rule, position, accepted = observations(4000, seed=1)
    for part in np.array_split(np.arange(len(x)), 100):
        it.learn(x[part], rule[part], position[part], accepted[part])
    for index in range(RULES):
        mine = rule == index
        best = minimize(penalised_loss, np.zeros(D * (GAMMA + 1)), (x[mine], position[mine], accepted[mine])).x
        assert it.theta[index] == pytest.approx(START + best[D:].reshape(GAMMA, D), abs=0.04)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_the_solve_is_that_of_the_joint_system(seed):
    rng = np.random.default_rng(seed)
    it = fits()
    root = rng.normal(size=(RULES, GAMMA, D, D)) * rng.choice([0.0, 1.0, 10.0], (RULES, GAMMA, 1, 1))
    it._curvature = root @ root.swapaxes(-1, -2)
    it._information = rng.normal(0, 0.3, (RULES, GAMMA, D))  # small enough that no step is cut
    it._solve()
    pooled, position = np.diag(LEAN.pooled / 4), np.diag(LEAN.position / 4)
    for rule in range(RULES):
        system = np.zeros((D * (GAMMA + 1),) * 2)
        system[:D, :D] = pooled + GAMMA * position
        for k in range(GAMMA):
            own = slice(D * (k + 1), D * (k + 2))
            system[own, own] = it._curvature[rule, k] + position
            system[:D, own] = system[own, :D] = -position
        right = np.concatenate([np.zeros(D), it._information[rule].ravel()])
        assert it._deviation[rule].ravel() == pytest.approx(np.linalg.solve(system, right)[D:], abs=1e-8)


def test_an_observation_moves_its_own_position_most_the_others_a_little_and_the_other_rule_not():
    it = fits()
    before = it.theta.copy()
    x = np.tile([1.0, 0.0], (64, 1))
    it.learn(x, np.zeros(64, int), np.ones(64, int), np.arange(64) < 24)
    moved = it.theta - before
    assert moved[0, 1, 0] < moved[0, 0, 0] < -0.03 and moved[0, 0, 0] == pytest.approx(moved[0, 2, 0])
    assert not moved[1].any()


def test_half_is_forgotten_after_the_half_life():
    it = fits(half_life=500.0)
    x, _, _, accepted = observations(500, seed=3)
    zeros = np.zeros(500, int)
    it.learn(x, zeros, zeros, accepted)
    kept = it._curvature[0, 0].copy()
    it.learn(x * [1.0, 0.0], zeros, zeros, accepted)
    assert it._curvature[0, 0, 1, 1] == pytest.approx(kept[1, 1] / 2, rel=1e-6)


def test_a_change_is_noticed_and_chance_is_not():
    """Within the noise of the truth itself nothing is thrown away; once outcomes change, at least half soon is."""
    it = fits()
    rng = np.random.default_rng(0)
    keeps = []
    calm = it._calm
    it._calm = lambda *sums: keeps.append(calm(*sums)) or keeps[-1]
    for step in range(700):
        x, rule, position, accepted = observations(64, seed=step, theta=(0.0, 1.0))
        if step >= 600:
            accepted &= rng.random(64) < 0.5
        it.learn(x, rule, position, accepted)
    assert np.mean(np.array(keeps[:600]) < 1) < 0.002
    assert (np.array(keeps[600:]) < 1).any(axis=0).all()


def test_a_start_beyond_the_bounds_is_its_own_bound():
    start = np.broadcast_to([0.0, 9.0], (RULES, GAMMA, D)).copy()
    it = OnlineLogistic(start, LEAN, np.full(D, -8.0), np.full(D, 8.0), np.inf)
    x, rule, position, accepted = observations(64, seed=2)
    it.learn(x[rule == 0], rule[rule == 0], position[rule == 0], accepted[rule == 0])
    assert (it.theta[1] == start[1]).all()  # of which nothing was seen
    assert (it.theta[0, :, 1] < 9.0).all()
