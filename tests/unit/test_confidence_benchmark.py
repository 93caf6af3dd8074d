"""The confidence benchmark on a trace whose truth is known: it ranks the sources as they deserve."""

import numpy as np
import pytest

from benchmarks import confidence
from benchmarks.confidence import WARM_UP, Calibrated, Replay, auc_error, judge, split, switch
from sglang_dspark.confidence import FEATURES, HEAD, RULES
from sglang_dspark.confidence.reliability import auc, calibration_error
from sglang_dspark.observe import TraceWriter, read_trace

GAMMA, REQUESTS, STEPS = 3, 32, 150
DOMAINS = {"code": [1, STEPS], "math": [STEPS + 1, 2 * STEPS], "chat": [2 * STEPS + 1, 3 * STEPS]}


@pytest.fixture(scope="module", params=[FEATURES, HEAD.shown], ids=["draft", "head"])
def trace(request, tmp_path_factory):
    """Acceptance depends on the margin, which max-probability does not know; in chat it is far lower. The head knows
    the truth of the other domains."""
    path = tmp_path_factory.mktemp("trace") / "t"
    rng = np.random.default_rng(0)
    with_head = len(request.param) > len(FEATURES)
    writer = TraceWriter(path, GAMMA, request.param, RULES, 1 << 26)
    for step in range(1, 3 * STEPS + 1):
        logit, margin = rng.normal(1, 1.5, (REQUESTS, GAMMA)), rng.exponential(2, (REQUESTS, GAMMA))
        truth = 0.5 * logit + 0.8 * margin - 1.5
        shown = [logit, margin, np.ones_like(logit), *([truth, truth] if with_head else [])]
        likely = 1 / (1 + np.exp(-truth + 1.5 * (step > 2 * STEPS)))
        accepted = np.cumprod(rng.random((REQUESTS, GAMMA)) < likely, axis=1).sum(axis=1)
        writer.write(
            REQUESTS, step=step, request=step * REQUESTS + np.arange(REQUESTS), rule=np.arange(REQUESTS) % 2,
            clean=True, depth=GAMMA, verified=GAMMA, accepted=accepted, budget=0, tokens=0, kv_tokens=0, seconds=0.1,
            recent=0.0, shown=np.stack(shown, axis=-1), confidence=0.5,
        )  # fmt: skip
    return read_trace(path)


@pytest.mark.parametrize("alike", [1, 8], ids=["rows apart", "eight rows an answer, all alike"])
def test_the_error_of_an_auc_is_how_far_repeats_lie_apart(alike):
    rng = np.random.default_rng(1)

    def repeat():
        chance = rng.random(60)
        return np.repeat(chance, alike), np.repeat(rng.random(60) < chance, alike)

    repeats = [repeat() for _ in range(100)]
    answers = np.repeat(np.arange(60), alike)
    said = np.mean([auc_error(*each, answers) for each in repeats[:10]])
    assert said == pytest.approx(np.std([auc(*each) for each in repeats]), rel=0.25)


def test_sources_are_ranked_as_they_deserve(trace, monkeypatch):
    monkeypatch.setattr(confidence, "RESAMPLES", 2)
    result = judge(trace, split(trace, DOMAINS))
    learnt = f"estimator after {WARM_UP} steps"
    assert set(result) == {"all", *DOMAINS}
    for rule in RULES:
        assert result["all"][rule][0]["rows"] == sum(result[domain][rule][0]["rows"] for domain in DOMAINS)
    for domain in DOMAINS:
        rules = result[domain]
        for rule in RULES:
            first = rules[rule][0]
            assert first["rows"] == (STEPS - WARM_UP // 3) * REQUESTS // 2
            assert first[learnt]["auc"] > first["max-probability"]["auc"] + 0.03
            if "head" in first and domain != "chat":
                assert first["head"]["ece"] < 0.05 and first["head"]["auc"] >= first[learnt]["auc"] - 0.02
    # The estimator met chat for no more than a third of its warm-up, the cold one not at all.
    assert result["chat"]["greedy"][0][learnt]["ece"] < result["chat"]["greedy"][0]["estimator, cold"]["ece"]


def test_a_switch_is_followed_by_what_learns(trace):
    series = switch(trace, split(trace, DOMAINS))
    assert [len(rows) for rows in series.values()] == [3, 3, 3]
    first, last = series["chat"][0], series["chat"][-1]
    assert last["online"] < 0.05 < last["stopped"]
    assert last["online"] < first["online"]


@pytest.mark.parametrize("trace", [HEAD.shown], ids=["head"], indirect=True)
def test_a_calibrated_source_is_right_on_the_requests_that_its_temperatures_were_not_fitted_to(trace):
    records = trace.records[trace.records["step"] <= STEPS].copy()  # of one domain
    records["shown"][..., len(FEATURES) :] *= 3.0  # a head that is far too sure
    sure = trace._replace(records=records)
    steps = split(sure, {"code": DOMAINS["code"]})["code"]

    def error(source):
        said = np.concatenate([source.confidence(step)[:, 0] for step in steps])
        return calibration_error(said, np.concatenate([step.records["accepted"] > 0 for step in steps]))

    assert error(Calibrated(sure, HEAD)) < 0.03 < 0.1 < error(Replay(sure, HEAD, learns=False))
