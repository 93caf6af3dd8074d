"""Confidence: right on what is observed, whatever the schedule let be observed, and moved by nobody who is odd."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sglang_dspark.confidence import HEAD, HEADLESS, RULES, Estimator, PositionPrior, Rows, Source, draft_features

GAMMA, REQUESTS = 4, 64

Policy = Callable[[np.ndarray, np.random.Generator, int], np.ndarray]
POLICIES: dict[str, Policy] = {
    "all": lambda c, rng, step: np.full(len(c), GAMMA),
    "random": lambda c, rng, step: rng.integers(0, GAMMA + 1, len(c)),
    "by confidence": lambda c, rng, step: (np.cumprod(c, axis=1) > 0.3).sum(axis=1),
    "only the likely": lambda c, rng, step: (np.cumprod(c, axis=1) > 0.6).sum(axis=1),
    "only the unlikely": lambda c, rng, step: np.where(c[:, 0] < 0.5, GAMMA, 0),
    "by depth": lambda c, rng, step: np.full(len(c), step % (GAMMA + 1)),
    "by turns": lambda c, rng, step: np.full(len(c), 1 if step // 100 % 2 else GAMMA),
}


@dataclass
class World:
    """Requests whose acceptance is known: a logistic model of what is shown, for each rule and position."""

    source: Source
    truth: np.ndarray
    """[rules, GAMMA, D]"""

    def draw(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """[rows, GAMMA, features]: features that hang together as those of a real draft do."""
        logit = rng.normal(0.8, 1.8, (rows, GAMMA))
        margin = np.maximum(logit + rng.exponential(1.0, logit.shape), 0.01)
        entropy = np.clip(2.5 - 0.8 * logit + rng.normal(0, 0.7, logit.shape), 0.0, 8.0)
        shown = [logit, margin, entropy]
        if self.source is HEAD:
            shown += [logit + rng.normal(0, 0.5, logit.shape), logit - 0.5]
        return np.stack(shown, axis=-1).astype(np.float32)

    def acceptance(self, shown: np.ndarray, rule: np.ndarray) -> np.ndarray:
        return sigmoid((evidence(self.source, shown, rule) * self.truth[rule]).sum(axis=-1))


def evidence(source: Source, shown: np.ndarray, rule: np.ndarray) -> np.ndarray:
    return source.evidence(torch.from_numpy(shown), torch.zeros(len(shown)), torch.from_numpy(rule)).numpy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rows_of(rule: np.ndarray, generation: int = 0) -> Rows:
    return Rows(np.arange(len(rule)), np.full(len(rule), generation), rule)


def world(source: Source = HEADLESS, shift: float = 0.0) -> World:
    """An over-confident draft that grows worse with depth, and worse under sampling."""
    k = np.arange(GAMMA)[:, None]
    greedy, sampled = ([0.6, 0.7, 0.1, -0.1, 0.0], [0.2, 0.5, 0.05, -0.15, 0.0])
    if source is HEAD:
        greedy, sampled = ([0.6, 0.8, 0.0], [0.2, 0.6, 0.0])
    drift = np.zeros(len(greedy))
    drift[:2] = -0.15, -0.05
    truth = np.stack([np.array(start) + drift * k for start in (greedy, sampled)])
    truth[..., 0] += shift
    return World(source, truth)


def serve(
    estimator: Estimator, world: World, policy: Policy, steps: int, seed: int = 0, watch: Callable | None = None
) -> np.ndarray:
    """Feeds a censored stream: of each request only what was reached and verified. Returns seen, [rules, GAMMA]."""
    rng = np.random.default_rng(seed)
    count = np.zeros((len(RULES), GAMMA))
    for step in range(steps):
        rule = rng.integers(0, 2, REQUESTS)
        rows = rows_of(rule, generation=step)  # new requests each step: their recent past is known to be nothing
        shown = world.draw(rng, REQUESTS)
        confidence = estimator.evaluate(torch.from_numpy(shown), rows).numpy()
        verified = policy(confidence, rng, step)
        accepts = rng.random((REQUESTS, GAMMA)) < world.acceptance(shown, rule)
        accepted = np.minimum(np.cumprod(accepts, axis=1).sum(axis=1), verified)
        seen = np.arange(GAMMA) < np.minimum(verified, accepted + 1)[:, None]
        if watch is not None:
            watch(step, confidence[seen], (np.arange(GAMMA) < accepted[:, None])[seen])
        np.add.at(count, rule, seen)
        # What was not seen is NaN, so that a fit which looks at it cannot pass.
        visible = np.where(seen[..., None], shown, np.nan).astype(np.float32)
        estimator.observe(visible, estimator.recent(rows), rows, accepted, verified, np.ones(REQUESTS, bool))
    return count


def error(estimator: Estimator, world: World, policy: Policy) -> np.ndarray:
    """[rules, GAMMA] mean absolute error of the confidence where the policy looks, by the known truth."""
    rng = np.random.default_rng(99)
    rule = rng.integers(0, 2, 8000)
    shown = world.draw(rng, len(rule))
    x = evidence(world.source, shown, rule)
    confidence = sigmoid((x * estimator.coefficients[rule]).sum(axis=-1))
    looked = np.arange(GAMMA) < policy(confidence, rng, GAMMA)[:, None]
    wrong = np.where(looked, np.abs(confidence - world.acceptance(shown, rule)), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where it never looks, the mean is of nothing: NaN
        return np.array([np.nanmean(wrong[rule == r], axis=0) for r in range(len(RULES))])


@pytest.mark.parametrize(
    ("name", "source"), [*((name, HEADLESS) for name in POLICIES), ("random", HEAD), ("by confidence", HEAD)],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_the_estimate_converges_to_the_truth_under_any_schedule(name: str, source: Source):
    truth = world(source)
    estimator = Estimator(REQUESTS, GAMMA, source)
    count = serve(estimator, truth, POLICIES[name], 900)
    wrong = error(estimator, truth, POLICIES[name])
    enough = (count > 2500) & np.isfinite(wrong)
    assert enough[:, 0].all()
    assert (wrong[enough] < 0.02).all(), wrong


def test_where_nothing_is_verified_nothing_is_learnt():
    estimator = Estimator(REQUESTS, GAMMA)
    before = estimator.coefficients.copy()
    serve(estimator, world(), lambda c, rng, step: np.zeros(len(c), int), 50)
    assert np.array_equal(estimator.coefficients, before)


def test_the_rules_are_fitted_apart():
    estimator = Estimator(8, GAMMA)
    before = estimator.coefficients.copy()
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = rows_of(np.zeros(8, int))
        shown = world().draw(rng, 8)
        estimator.observe(shown, estimator.recent(rows), rows, np.zeros(8, int), np.full(8, GAMMA), np.ones(8, bool))
    assert not np.allclose(estimator.coefficients[0], before[0])
    assert np.array_equal(estimator.coefficients[1], before[1])


def test_a_position_never_verified_inherits_what_the_others_showed():
    estimator, truth = Estimator(REQUESTS, GAMMA), world(shift=-1.5)
    serve(estimator, truth, lambda c, rng, step: np.full(len(c), 2), 300)
    fresh = Estimator(REQUESTS, GAMMA)
    assert (error(estimator, truth, POLICIES["all"])[:, 3] < error(fresh, truth, POLICIES["all"])[:, 3] / 2).all()


def odd_beside_clean(odd: bool) -> Estimator:
    """Half of the batch clean; the other half, if ``odd``, flagged requests whose every draft is refused."""
    estimator, truth = Estimator(REQUESTS, GAMMA), world()
    rng = np.random.default_rng(0)
    half = REQUESTS // 2
    for _ in range(400):
        rule = rng.integers(0, 2, REQUESTS)
        shown = truth.draw(rng, REQUESTS)
        run = np.cumprod(rng.random((REQUESTS, GAMMA)) < truth.acceptance(shown, rule), axis=1).sum(axis=1)
        clean = np.arange(REQUESTS) < half
        accepted = np.where(clean, run, 0)
        keep = np.flatnonzero(clean | odd)
        rows = Rows(keep, np.zeros(len(keep), int), rule[keep])
        verified = np.full(len(keep), GAMMA)
        estimator.observe(shown[keep], estimator.recent(rows), rows, accepted[keep], verified, clean[keep])
    return estimator


def test_an_odd_client_moves_its_own_estimates_and_nobody_elses():
    alone, beside = odd_beside_clean(False), odd_beside_clean(True)
    rng = np.random.default_rng(1)
    shown = torch.from_numpy(world().draw(rng, REQUESTS))
    rows = rows_of(rng.integers(0, 2, REQUESTS))
    half = REQUESTS // 2
    moved = (beside.evaluate(shown, rows) - alone.evaluate(shown, rows)).abs()
    assert moved[:half].max() < 0.01
    assert (beside.recent(rows)[half:] < -2).all() and (np.abs(beside.recent(rows)[:half]) < 1).all()


def test_a_requests_recent_acceptance_becomes_evidence():
    """Half of the requests accept far less than the draft shows; each is known by its own past alone."""
    estimator, truth = Estimator(REQUESTS, GAMMA), world()
    rng = np.random.default_rng(0)
    poor = np.arange(REQUESTS) % 2 == 0
    rule = np.zeros(REQUESTS, int)
    rows = rows_of(rule)
    for _ in range(300):
        shown = truth.draw(rng, REQUESTS)
        likely = truth.acceptance(shown, rule) * np.where(poor, 0.3, 1.0)[:, None]
        accepted = np.cumprod(rng.random((REQUESTS, GAMMA)) < likely, axis=1).sum(axis=1)
        estimator.observe(
            shown, estimator.recent(rows), rows, accepted, np.full(REQUESTS, GAMMA), np.ones(REQUESTS, bool)
        )
    shown = torch.from_numpy(truth.draw(rng, 1)).expand(REQUESTS, -1, -1)
    confidence = estimator.evaluate(shown, rows)[:, 0].numpy()
    assert confidence[~poor].min() > confidence[poor].max() + 0.1
    another = estimator.evaluate(shown, rows_of(rule, generation=1))[:, 0].numpy()
    assert np.ptp(another) < 1e-6  # the slots' next requests have no past


def test_without_a_head_the_start_is_the_drafts_own_probability():
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.97, 0.02, 0.01], [0.4, 0.35, 0.25]])
    shown = draft_features(probabilities.log())[:, None].expand(-1, GAMMA, -1)
    confidence = Estimator(4, GAMMA).evaluate(shown, rows_of(np.array([0, 1, 0])))
    assert torch.allclose(confidence, probabilities[:, :1].expand(-1, GAMMA), atol=1e-5)


def test_temperatures_divide_the_starting_logits():
    temperatures = np.array([[1.0, 2.0, 4.0, 1.0], [0.5, 1.0, 1.0, 1.0]])
    estimator = Estimator(4, GAMMA, HEAD, temperatures)
    shown = torch.full((2, GAMMA, len(HEAD.shown)), 2.0)
    confidence = estimator.evaluate(shown, rows_of(np.array([0, 1]))).numpy()
    assert confidence == pytest.approx(sigmoid(2.0 / temperatures), abs=1e-6)


def test_nan_and_absurd_streams_leave_finite_bounded_coefficients():
    estimator = Estimator(REQUESTS, GAMMA)
    rng = np.random.default_rng(0)
    values = [np.nan, 0.0, 1.0, -1e30, 1e30, np.inf, -np.inf]
    for step in range(200):
        shown = rng.choice(values, (REQUESTS, GAMMA, 3)).astype(np.float32)
        rows = rows_of(rng.integers(0, 2, REQUESTS))
        accepted = np.full(REQUESTS, GAMMA if step % 2 else 0)
        estimator.observe(
            shown, estimator.recent(rows), rows, accepted, np.full(REQUESTS, GAMMA), np.ones(REQUESTS, bool)
        )
    low, high = HEADLESS.low, HEADLESS.high
    assert ((estimator.coefficients >= low) & (estimator.coefficients <= high)).all()
    confidence = estimator.evaluate(torch.from_numpy(shown), rows).numpy()
    bad = np.isnan(shown).any(axis=-1)
    assert np.isnan(confidence[bad]).all() and np.isfinite(confidence[~bad]).all()


def test_features_are_those_of_the_distribution():
    logits = torch.randn(6, 50, dtype=torch.float64) * 4
    logits[5, 10:] = -torch.inf  # tokens ruled out
    shown = draft_features(logits).double()
    p = logits.softmax(-1)
    best = p.topk(2).values
    assert torch.allclose(shown[:, 0], torch.logit(best[:, 0]), atol=1e-4)
    assert torch.allclose(shown[:, 1], (best[:, 0] / best[:, 1]).log(), atol=1e-4)
    assert torch.allclose(shown[:, 2], -(p * p.clamp_min(1e-300).log()).sum(-1), atol=1e-4)
    assert torch.equal(draft_features(logits + 7.0).float().round(decimals=3), shown.float().round(decimals=3))


def test_features_of_hopeless_rows_stay_within_their_row():
    logits = torch.zeros(4, 8)
    logits[0, 0] = torch.nan
    logits[1, 1:] = -torch.inf  # one token has everything
    logits[2, 3] = 1e30
    shown = draft_features(logits)
    assert shown[0].isnan().all() and shown[3].isfinite().all()
    assert shown[1, 0] > 30 and shown[2, 0] > 30 and (shown[1:3, 2].abs() < 1e-6).all()


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
