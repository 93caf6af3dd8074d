"""Confidence from what the draft shows: right on what is observed, whatever the schedule let be observed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sglang_dspark.confidence import RULES, DraftConfidence, PositionPrior, evaluate

GAMMA, REQUESTS = 4, 64
# True acceptance: an over-confident draft that grows worse with depth, and worse under sampling.
TRUE_A = np.array([[0.3, 0.1, 0.0, -0.2], [-0.5, -0.6, -0.8, -0.9]])
TRUE_B = np.array([[0.8, 0.8, 0.7, 0.7], [0.5, 0.5, 0.5, 0.5]])

Policy = Callable[[np.ndarray, np.random.Generator], np.ndarray]
POLICIES: dict[str, Policy] = {
    "all": lambda p, rng: np.full(len(p), GAMMA),
    "random": lambda p, rng: rng.integers(0, GAMMA + 1, len(p)),
    "by confidence": lambda p, rng: (np.cumprod(p, axis=1) > 0.3).sum(axis=1),
    "only the likely": lambda p, rng: (np.cumprod(p, axis=1) > 0.6).sum(axis=1),
}


def acceptance(rule: np.ndarray, top_prob: np.ndarray) -> np.ndarray:
    logit = np.log(top_prob / (1 - top_prob))
    return 1 / (1 + np.exp(-(TRUE_A[rule] + TRUE_B[rule] * logit)))


def serve(estimator: DraftConfidence, policy: Policy, steps: int, seed: int = 0, flip: bool = False) -> None:
    """Feeds a censored stream: of each request only what was reached and verified."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        top_prob = np.clip(rng.beta(2, 1, (REQUESTS, GAMMA)), 1e-3, 1 - 1e-3)
        rule = rng.integers(0, 2, REQUESTS)
        likely = acceptance(rule, top_prob)
        accepts = rng.random((REQUESTS, GAMMA)) < (1 - likely if flip else likely)
        verified = policy(top_prob, rng)
        accepted = np.minimum(np.cumprod(accepts, axis=1).sum(axis=1), verified)
        seen = np.arange(GAMMA) < np.minimum(verified, accepted + 1)[:, None]
        # What was not seen is NaN, so that a fit which looks at it cannot pass.
        estimator.observe(np.where(seen, top_prob, np.nan).astype(np.float32), rule, accepted, verified)


def error(estimator: DraftConfidence, position: int, rule: int, lowest: float) -> float:
    """Mean absolute error of the confidence over top probabilities as the draft shows them, from `lowest` on."""
    rng = np.random.default_rng(1)
    top_prob = np.clip(rng.beta(2, 1, 4000), 1e-3, 1 - 1e-3)
    top_prob = top_prob[top_prob > lowest]
    rules = torch.full((len(top_prob),), rule)
    estimate = evaluate(torch.from_numpy(top_prob), position, rules, torch.from_numpy(estimator.parameters()))
    truth = acceptance(np.full(len(top_prob), rule), top_prob[:, None].repeat(GAMMA, 1))[:, position]
    return float(np.abs(estimate.numpy() - truth).mean())


@pytest.mark.parametrize("name", POLICIES)
def test_the_estimate_converges_under_any_schedule(name: str):
    estimator = DraftConfidence(GAMMA)
    serve(estimator, POLICIES[name], 700)
    # Where the schedule hardly ever looks, the estimate is judged where it does: at high probabilities.
    lowest = 0.6 if name == "only the likely" else 0.0
    for rule in range(len(RULES)):
        assert error(estimator, 0, rule, lowest) < 0.02
        assert np.mean([error(estimator, k, rule, lowest) for k in range(3)]) < 0.02


def test_the_rules_are_fitted_apart():
    estimator = DraftConfidence(GAMMA)
    rng = np.random.default_rng(0)
    before = estimator.parameters()
    for _ in range(50):
        top_prob = rng.random((REQUESTS, GAMMA)).astype(np.float32)
        estimator.observe(top_prob, np.zeros(REQUESTS, int), np.zeros(REQUESTS, int), np.full(REQUESTS, GAMMA))
    assert not np.allclose(estimator.parameters()[0], before[0])
    assert np.array_equal(estimator.parameters()[1], before[1])


def test_the_start_is_the_drafts_own_probability():
    parameters = torch.from_numpy(DraftConfidence(GAMMA).parameters())
    top_prob = torch.tensor([0.1, 0.5, 0.97])
    assert torch.allclose(evaluate(top_prob, 2, torch.tensor([0, 1, 0]), parameters), top_prob, atol=1e-6)


def test_a_position_never_verified_inherits_what_the_others_showed():
    estimator = DraftConfidence(GAMMA)
    serve(estimator, lambda p, rng: np.full(len(p), 2), 400)
    assert error(estimator, 3, 1, 0.0) < error(DraftConfidence(GAMMA), 3, 1, 0.0) / 2


def test_a_change_of_domain_is_followed():
    estimator = DraftConfidence(GAMMA)
    serve(estimator, POLICIES["all"], 300)
    rng = np.random.default_rng(3)
    for _ in range(300):  # now nothing but a fifth is accepted, whatever the draft shows
        top_prob = rng.beta(2, 1, (REQUESTS, GAMMA)).astype(np.float32)
        accepted = np.cumprod(rng.random((REQUESTS, GAMMA)) < 0.2, axis=1).sum(axis=1)
        estimator.observe(top_prob, np.zeros(REQUESTS, int), accepted, np.full(REQUESTS, GAMMA))
    shown = torch.tensor([0.2, 0.5, 0.9])
    estimate = evaluate(shown, 0, torch.zeros(3, dtype=torch.long), torch.from_numpy(estimator.parameters()))
    assert torch.allclose(estimate, torch.tensor(0.2), atol=0.06)


def test_requests_kept_out_teach_nothing():
    estimator, other = DraftConfidence(GAMMA), DraftConfidence(GAMMA)
    rng = np.random.default_rng(0)
    for _ in range(30):
        top_prob = rng.random((8, GAMMA)).astype(np.float32)
        accepted = rng.integers(0, GAMMA + 1, 8)
        rule, verified = np.zeros(8, int), np.full(8, GAMMA)
        mask = np.array([1, 0] * 4)
        estimator.observe(top_prob, rule, accepted, verified, mask)
        other.observe(top_prob[::2], rule[::2], accepted[::2], verified[::2])
    assert np.allclose(estimator.parameters(), other.parameters())


def test_nan_and_absurd_streams_leave_finite_bounded_parameters():
    estimator = DraftConfidence(GAMMA)
    rng = np.random.default_rng(0)
    for step in range(300):
        top_prob = rng.choice([np.nan, 0.0, 1.0, -1.0, 2.0, np.inf], (REQUESTS, GAMMA)).astype(np.float32)
        accepted = np.full(REQUESTS, GAMMA if step % 2 else 0)
        estimator.observe(top_prob, rng.integers(0, 2, REQUESTS), accepted, np.full(REQUESTS, GAMMA))
    parameters = estimator.parameters()
    assert np.isfinite(parameters).all()
    assert (np.abs(parameters[..., 0]) <= 6).all() and ((parameters[..., 1] >= 0) & (parameters[..., 1] <= 4)).all()


def test_more_probability_never_means_less_confidence():
    estimator = DraftConfidence(GAMMA)
    serve(estimator, POLICIES["all"], 200, flip=True)
    shown = torch.linspace(0, 1, 101)
    estimate = evaluate(shown, 0, torch.zeros(101, dtype=torch.long), torch.from_numpy(estimator.parameters()))
    assert (estimate.diff() >= 0).all() and ((estimate > 0) & (estimate < 1)).all()


def test_the_prior_learns_conditional_acceptance_from_censored_steps():
    prior, rng = PositionPrior(3), np.random.default_rng(0)
    truth = np.array([0.8, 0.5, 0.3])
    for _ in range(400):
        verified = rng.integers(0, 4, 64)
        run = np.cumprod(rng.random((64, 3)) < truth, axis=1).sum(axis=1)
        prior.observe(np.minimum(run, verified), verified)
    assert prior.values().dtype == np.float32
    assert prior.values() == pytest.approx(truth, abs=0.03)


def test_the_prior_counts_only_what_was_reached_and_verified():
    prior = PositionPrior(4)
    start = prior.values()
    prior.observe(np.array([1, 0]), np.array([3, 0]))
    after = prior.values()
    assert after[0] > start[0] and after[1] < start[1]  # accepted, rejected
    assert np.array_equal(after[2:], start[2:])  # verified but not reached


def test_the_prior_forgets():
    prior = PositionPrior(1, half_life=100)
    for _ in range(20):
        prior.observe(np.ones(50, int), np.ones(50, int))
    for _ in range(20):
        prior.observe(np.zeros(50, int), np.ones(50, int))
    assert prior.values()[0] < 0.01
