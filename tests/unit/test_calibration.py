"""Calibration: temperatures found again from censored traces, and files that are refused in one sentence each."""

import importlib.util
import io
import json
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sglang_dspark.cli import main
from sglang_dspark.confidence import HEADLESS, RULES, load_calibration
from sglang_dspark.confidence.calibration import Calibration, fit_temperatures, save_calibration
from sglang_dspark.confidence.reliability import auc, brier, calibration_error, reliability
from sglang_dspark.observe import TraceWriter, read_trace

GAMMA = 3
TRUE = np.array([1.5, 0.7, 2.5])


def stream(n: int, temperatures: np.ndarray, seed: int = 0, threshold: float = 0.0):
    """Raw logits [n, GAMMA] whose truth is sigmoid(logit / temperature); accepted and verified, [n]; rows verify what
    the raw confidence holds likely enough."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (n, GAMMA))
    run = np.cumprod(rng.random((n, GAMMA)) < 1 / (1 + np.exp(-logits / temperatures)), axis=1).sum(axis=1)
    verified = (np.cumprod(1 / (1 + np.exp(-logits)), axis=1) > threshold).sum(axis=1)
    return logits, np.minimum(run, verified), verified


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_temperatures_are_found_again_whatever_was_verified(threshold):
    logits, accepted, verified = stream(40_000, TRUE, threshold=threshold)
    temperatures, samples, before, after = fit_temperatures(logits, accepted, verified)
    assert temperatures == pytest.approx(TRUE, rel=0.12)
    assert (after < 0.02).all() and (before > after).all()
    assert samples.tolist() == [(verified > k).sum() for k in range(GAMMA)]


def test_a_position_with_few_samples_keeps_its_confidence():
    logits, accepted, verified = stream(1000, TRUE)
    verified = np.where(np.arange(1000) < 150, verified, 2)
    temperatures, samples, *_ = fit_temperatures(logits, np.minimum(accepted, verified), verified)
    assert samples[2] == 150 and temperatures[2] == 1.0 and temperatures[0] != 1.0


def test_measures_on_cases_with_known_answers():
    said = np.array([0.1, 0.1, 0.9, 0.9])
    happened = np.array([0, 1, 1, 1])
    assert calibration_error(said, happened) == pytest.approx((0.4 + 0.1) / 2)
    assert brier(said, happened) == pytest.approx((0.01 + 0.81 + 0.01 + 0.01) / 4)
    assert auc(said, happened) == pytest.approx((1 + 1 + 0.5) / 3)
    curve = reliability(said, happened)
    assert curve.samples.sum() == 4 and curve.outcome[9] == 1.0 and curve.confidence[1] == pytest.approx(0.1)
    assert calibration_error(np.ones(3), np.ones(3)) == 0.0  # a probability of 1 has a bin
    assert np.isnan(auc(said, np.ones(4))) and np.isnan(calibration_error(said[:0], happened[:0]))


def test_auc_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    said, happened = rng.integers(0, 5, 60) / 4, rng.random(60) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in said[happened] for b in said[~happened]]
    assert auc(said, happened) == pytest.approx(np.mean(pairs))


# -- files ---------------------------------------------------------------------------------------------------------


def calibration() -> Calibration:
    row = (1.5, 0.7, 1.0)
    rules = {rule: row for rule in RULES}
    nan = {rule: (0.1, 0.2, float("nan")) for rule in RULES}
    return Calibration("draft", rules, {rule: (900, 300, 0) for rule in RULES}, nan, nan)


def test_a_saved_calibration_comes_back(tmp_path):
    save_calibration(tmp_path / "c.json", calibration())
    loaded = load_calibration(tmp_path / "c.json", RULES, GAMMA)
    assert loaded.temperature(RULES).tolist() == [[1.5, 0.7, 1.0]] * 2
    assert np.isnan(loaded.ece_after["greedy"][2]) and loaded.samples == calibration().samples


def test_sglangs_file_is_read_for_all_rules(tmp_path):
    path = tmp_path / "sts.json"
    path.write_text(sglangs().DSparkStsCalibration(temperatures=[1.1, 0.9, 2.0], dataset="d", num_samples=7).to_json())
    loaded = load_calibration(path, RULES, 3)
    assert loaded.source == "head"
    assert loaded.temperature(RULES).tolist() == [[1.1, 0.9, 2.0]] * 2


def sglangs():
    """SGLang's module of the format, by its path: importing it with its packages takes 10 seconds."""
    folder = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    file = folder / "srt" / "speculative" / "dspark_components" / "dspark_sts.py"
    spec = importlib.util.spec_from_file_location("dspark_sts", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_rule_that_a_file_lacks_keeps_its_confidence(tmp_path):
    path = tmp_path / "c.json"
    content = written(tmp_path)
    for name in ("temperatures", "samples", "ece_before", "ece_after"):
        del content[name]["sampled"]
    path.write_text(json.dumps(content))
    assert load_calibration(path, RULES).temperature(RULES)[1].tolist() == [1.0] * GAMMA


def written(folder) -> dict:
    save_calibration(folder / "good.json", calibration())
    return json.loads((folder / "good.json").read_text())


def changed(**changes):
    return lambda content: json.dumps({**content, **changes}).encode()


def raw(name, text):
    """What json.dumps does not write."""
    return lambda content: json.dumps({**content, name: "HERE"}).replace('"HERE"', text).encode()


def with_temperatures(row):
    return lambda content: json.dumps({**content, "temperatures": {rule: row for rule in RULES}}).encode()


class Trap:
    """A pickle that would run code."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def zipped(_):
    """What torch.save writes: a zip with a pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Trap()))
    return buffer.getvalue()


BAD = {
    "empty": lambda content: b"",
    "truncated": lambda content: json.dumps(content).encode()[:-20],
    "binary": lambda content: bytes(range(256)),
    "pickle": lambda content: pickle.dumps(Trap()),
    "old pickle": lambda content: pickle.dumps(Trap(), protocol=0),
    "torch file": zipped,
    "list": lambda content: b"[1.0, 1.0, 1.0]",
    "too large": lambda content: b" " * (1 << 21),
    "deeply nested": lambda content: b"[" * 100_000,
    "other version": changed(format="sglang-dspark-calibration/0"),
    "no temperatures": changed(temperatures={}),
    "temperatures no object": changed(temperatures=[1.0]),
    "unknown rule": changed(temperatures={"beam": [1.0] * 3}),
    "no source": changed(source=None),
    "report missing": changed(samples=None),
    "report of another length": changed(samples={rule: [1, 2] for rule in RULES}),
    "NaN": with_temperatures([1.0, float("nan"), 1.0]),
    "infinite": with_temperatures([1.0, float("inf"), 1.0]),
    "zero": with_temperatures([1.0, 0.0, 1.0]),
    "negative": with_temperatures([1.0, -1.0, 1.0]),
    "boolean": with_temperatures([1.0, True, 1.0]),
    "text": with_temperatures([1.0, "1", 1.0]),
    "nested": with_temperatures([[1.0], [1.0], [1.0]]),
    "uneven": changed(temperatures={"greedy": [1.0] * 3, "sampled": [1.0] * 2}),
    "wrong shape": with_temperatures([1.0] * 4),
    "no positions": with_temperatures([]),
    "no float holds a temperature": with_temperatures([1.0, 10**400, 1.0]),
    "no float holds an error": changed(ece_before={rule: [10**400] * 3 for rule in RULES}),
    "no float holds an error after": changed(ece_after={rule: [0.1, -(10**400), 0.1] for rule in RULES}),
    "infinite samples": raw("samples", '{"greedy": [1e999, 1, 1], "sampled": [1, 1, 1]}'),
    "samples that are a number": changed(samples={rule: 5 for rule in RULES}),
    "infinite samples of SGLang's": lambda content: b'{"temperatures": [1.0, 1.0, 1.0], "num_samples": 1e999}',
    "negative infinite ones": lambda content: b'{"temperatures": [1.0, 1.0, 1.0], "num_samples": -1e999}',
    "SGLang's with too large a temperature": lambda content: b'{"temperatures": [1, 1, 1%s]}' % (b"0" * 400),
    "more digits than are read": lambda content: b'{"temperatures": [1, 1, 1%s]}' % (b"0" * 5000),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_sentence_that_names_it(name, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(BAD[name](written(tmp_path)))
    with pytest.raises(ValueError, match=r"Calibration .*bad\.json") as refusal:
        load_calibration(path, RULES, GAMMA)
    text = str(refusal.value)
    assert text.endswith(".") and "\n" not in text


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path):
    """A trace whose greedy requests are half as sure as they say, and whose sampled ones are as sure as they say; rows
    that are not clean accept nothing."""
    path = tmp_path / "steps.trace"
    writer = TraceWriter(path, GAMMA, HEADLESS.shown, RULES, 1 << 24)
    for step in range(6):
        for rule, temperature in enumerate((2.0, 1.0)):
            logits, accepted, verified = stream(1000, np.full(GAMMA, temperature), seed=10 * step + rule)
            clean = np.arange(1000) % 10 > 0
            shown = np.stack([logits, logits, np.ones_like(logits)], axis=-1)
            writer.write(
                1000, step=step, request=np.arange(1000), rule=rule, clean=clean, depth=GAMMA, verified=verified,
                accepted=np.where(clean, accepted, 0), budget=3000, tokens=4000, kv_tokens=0, seconds=0.1, recent=0.0,
                shown=shown, confidence=1 / (1 + np.exp(-logits)),
            )  # fmt: skip
    return path


def test_the_command_fits_each_rule_from_clean_requests_and_reports(trace, tmp_path, capsys):
    out, plot = tmp_path / "calibration.json", tmp_path / "reliability.png"
    assert main(["calibrate", "--trace", str(trace), "--out", str(out), "--plot", str(plot), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    loaded = load_calibration(out, RULES, GAMMA)
    assert loaded.source == "draft"
    assert loaded.temperature(RULES)[0] == pytest.approx(2.0, rel=0.15)
    assert loaded.temperature(RULES)[1] == pytest.approx(1.0, rel=0.15)
    assert [(row["rule"], row["position"]) for row in report["positions"]] == [
        (r, k + 1) for r in RULES for k in range(3)
    ]
    greedy = [row for row in report["positions"] if row["rule"] == "greedy"]
    assert all(row["ece_after"] < 0.03 < row["ece_before"] and 0.6 < row["auc"] < 0.9 for row in greedy)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(read_trace(trace).records) == report["records"]


def test_the_command_prints_a_table(trace, tmp_path, capsys):
    assert main(["calibrate", "--trace", str(trace), "--out", str(tmp_path / "c.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * GAMMA and "temperature" in lines[0] and len({len(line) for line in lines}) == 1


def test_a_trace_too_short_to_fit_is_refused(tmp_path, capsys):
    path = tmp_path / "short.trace"
    TraceWriter(path, GAMMA, HEADLESS.shown, RULES, 1 << 20).close()
    assert main(["calibrate", "--trace", str(path), "--out", str(tmp_path / "c.json")]) == 1
    assert "record a longer one" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()


OTHER_RULES = ((), ("greedy",), ("sampled",), ("sampled", "greedy"), ("greedy", "sampled", "x"), ("greedy", "beam"))


@pytest.mark.parametrize("rules", OTHER_RULES)
def test_a_trace_with_other_verify_rules_is_refused(rules, tmp_path, capsys):
    path = tmp_path / "steps.trace"
    writer = TraceWriter(path, GAMMA, HEADLESS.shown, rules, 1 << 20)
    for rule in range(len(rules)):
        logits, accepted, verified = stream(1000, TRUE)
        writer.write(
            1000, step=1, request=np.arange(1000), rule=rule, clean=1, depth=GAMMA, verified=verified,
            accepted=accepted, budget=3000, tokens=4000, kv_tokens=0, seconds=0.1, recent=0.0,
            shown=np.stack([logits] * 3, axis=-1), confidence=0.5,
        )  # fmt: skip
    assert main(["calibrate", "--trace", str(path), "--out", str(tmp_path / "c.json")]) == 1
    error = capsys.readouterr().err
    assert (
        f"verify rules {', '.join(rules) or 'none'} where greedy, sampled are known" in error and error.count("\n") == 1
    )
    assert not (tmp_path / "c.json").exists()


def a_folder(folder):
    return folder


def under_a_file(folder):
    return folder / "steps.trace" / "file.png"


def beneath_a_file(folder):
    return folder / "steps.trace" / "deeper" / "file.png"


def where_nothing_is_made(folder):
    return Path("/proc/file.png")


@pytest.mark.parametrize("option", ("--trace", "--out", "--plot"))
@pytest.mark.parametrize(
    "path", (a_folder, under_a_file, beneath_a_file, where_nothing_is_made), ids=lambda path: path.__name__
)
def test_a_path_that_cannot_be_used_is_named_in_one_sentence(trace, tmp_path, capsys, option, path):
    chosen = {"--trace": trace, "--out": tmp_path / "c.json", option: path(tmp_path)}
    if option == "--plot" and path is a_folder:
        (tmp_path / "folder.png").mkdir()
        chosen[option] = tmp_path / "folder.png"
    assert main(["calibrate", *(str(word) for pair in chosen.items() for word in pair)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith("name another path or change what is there.\n")
    named = error.removeprefix("sglang-dspark calibrate: ").split(" cannot be used")[0]
    assert Path(named) in (chosen[option], *chosen[option].parents)
