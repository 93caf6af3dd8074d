"""Conditions from public reports on what is learnt of acceptance, and from whom."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dspark.confidence import HEADLESS, Estimator
from sglang_dspark.confidence.reliability import calibration_error
from sglang_dspark.engine.requests import is_clean
from tests.unit.test_confidence import GAMMA, POLICIES, REQUESTS, rows_of, serve, sigmoid, world
from tests.unit.test_step_scheduler import batch, scheduler, shown_at

PLAIN = {
    "logit_bias": None, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}  # fmt: skip
ODD = {
    "frequency penalty": {"frequency_penalty": 0.5},
    "presence penalty": {"presence_penalty": -0.5},
    "repetition penalty": {"repetition_penalty": 1.1},
    "logit bias": {"logit_bias": {"3": -100.0}},
    "min tokens": {"min_new_tokens": 5},
    "allowed tokens": {"custom_logit_processor": "a processor"},
    "grammar": {"grammar": object()},
}


def asking(wishes):
    wishes = {"grammar": None, "custom_logit_processor": None, **PLAIN, **wishes}
    own = {name: wishes.pop(name) for name in ("grammar", "custom_logit_processor")}
    return SimpleNamespace(sampling_params=SimpleNamespace(**wishes), **own)


def verify(it, described, accepted):
    """A step that verifies all drafts, which all show the same."""
    requests = len(accepted)
    it.plan(described, shown_at(0.7, requests))
    plan, shown = it.verify_all(requests), shown_at(0.7, requests, it.gamma)
    verified = np.full(requests, it.gamma)
    sent = it.launched(described, plan, shown, it.confidence(shown, described), requests * (1 + it.gamma))
    it.settle(sent, np.array(accepted), verified)


@pytest.mark.parametrize("name", ODD)
def test_c04_penalties_bad_words_or_allowed_tokens_leave_plain_clients_estimates_unmoved(name):
    odd, plain = asking(ODD[name]), asking({})
    clean = np.array([is_clean(odd), is_clean(plain), is_clean(odd)])
    it, alone = scheduler(), scheduler()
    for _ in range(30):  # the odd ones' drafts are all refused, the plain one's all accepted
        verify(it, batch()._replace(clean=clean), [0, it.gamma, 0])
        verify(alone, batch(requests=1), [it.gamma])
    assert clean.tolist() == [False, True, False]
    assert np.allclose(it.estimator.coefficients, alone.estimator.coefficients)
    assert np.allclose(it.priors[0].values(), alone.priors[0].values())


def test_c06_after_a_change_of_domain_the_calibration_error_recovers():
    errors: list[tuple[int, np.ndarray, np.ndarray]] = []

    def watch(step: int, confidence: np.ndarray, outcome: np.ndarray) -> None:
        errors.append((step, confidence, outcome))

    def ece(first: int, last: int) -> float:
        said, happened = zip(*[(c, o) for step, c, o in errors if first <= step < last], strict=True)
        return calibration_error(np.concatenate(said), np.concatenate(happened))

    estimator = Estimator(REQUESTS, GAMMA)
    serve(estimator, world(), POLICIES["by confidence"], 400, watch=watch)
    settled = ece(200, 400)
    errors.clear()
    serve(estimator, world(shift=-1.5), POLICIES["by confidence"], 400, seed=1, watch=watch)
    assert settled < 0.03
    assert ece(0, 5) > 0.15  # the change is one that hurts
    assert ece(250, 350) < 0.05


# What a draft's own log-odds are worth at a temperature: the target agrees with an argmax the less, the hotter it is.
TEMPERATURES = {0.0: (0.6, 1.0), 0.7: (0.0, 0.8), 1.0: (-0.5, 0.65)}


def test_c19_each_temperature_is_calibrated_on_its_own():
    """Greedy requests have coefficients of their own; among the sampled, each request's recent acceptance tells."""
    estimator, rng = Estimator(REQUESTS, GAMMA), np.random.default_rng(0)
    temperature = np.array(list(TEMPERATURES))[np.arange(REQUESTS) % 3]
    offset, slope = (np.array([TEMPERATURES[t][i] for t in temperature])[:, None] for i in (0, 1))
    rule, draws = (temperature > 0).astype(int), world(HEADLESS)
    said: dict[float, list] = {t: [] for t in TEMPERATURES}
    happened: dict[float, list] = {t: [] for t in TEMPERATURES}
    for number in range(500):
        rows = rows_of(rule, generation=number // 50)  # new requests now and then
        shown = draws.draw(rng, REQUESTS)
        confidence = estimator.evaluate(torch.from_numpy(shown), rows).numpy()
        accepts = rng.random((REQUESTS, GAMMA)) < sigmoid(offset + slope * shown[..., 0])
        accepted = np.cumprod(accepts, axis=1).sum(axis=1)
        seen = np.arange(GAMMA) <= accepted[:, None]
        for t in TEMPERATURES if number >= 250 else ():
            mine = seen & (temperature == t)[:, None]
            said[t].append(confidence[mine])
            happened[t].append(accepts[mine])
        whole = np.full(REQUESTS, GAMMA)
        estimator.observe(shown, estimator.recent(rows), rows, accepted, whole, np.ones(REQUESTS, bool))
    for t in TEMPERATURES:
        assert calibration_error(np.concatenate(said[t]), np.concatenate(happened[t])) < 0.05, t
