"""`sglang-dspark train` from prompts to a measured draft, and its refusals."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dspark.cli import main
from sglang_dspark.confidence.head import HEAD_FILE, HEAD_RULES
from sglang_dspark.train import pipeline
from sglang_dspark.train.export import export
from sglang_dspark.train.model import draft_from_target
from sglang_dspark.train.pipeline import hold_back
from sglang_dspark.train.target import Target
from tests.train_tiny import VOCAB, set_options, write_target


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"turns": [f"what is {i} and {i}"]}) + "\n" for i in range(count)))
    return path


def command(tmp_path: Path, out: Path, *extra: object) -> list[str]:
    """Arguments of `train` for a tiny target, which is written if need be."""
    target = tmp_path / "target"
    if not target.exists():
        write_target(target)
    prompts = write_prompts(tmp_path / "gsm8k.jsonl", 40)
    arguments = ["train", "--target", target, "--prompts", prompts, "--out", out, "--work", tmp_path / "work"]
    arguments += ["--workers", 1, "--left-out", 0.4, "--max-new-tokens", 12, "--sampled-share", 0.6]
    arguments += ["--draft-vocab", 100, "--epochs", 1, "--rollout-steps", 2, *extra]
    return [str(argument) for argument in arguments]


def run(tmp_path: Path, out: Path, *extra: object) -> dict[str, Any]:
    """`train` on a tiny target; its metrics."""
    assert main(command(tmp_path, out, *extra)) == 0
    return json.loads((out / "metrics.json").read_text())


def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *extra: object) -> str:
    """The one sentence with which `train` ends before anything is generated."""

    def generated(*_: object, **__: object) -> None:
        raise AssertionError("generated")

    monkeypatch.setattr(pipeline, "generate", generated)
    monkeypatch.setattr(pipeline, "write_variations", generated)
    assert main(command(tmp_path, tmp_path / "out", *extra)) == 1
    error = capsys.readouterr().err
    assert error.startswith("sglang-dspark train: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "work").exists()
    return error.removeprefix("sglang-dspark train: ")


def test_train_leaves_a_draft_with_its_head_and_their_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    draft = tmp_path / "draft"
    metrics = run(tmp_path, draft)
    files = sorted(f.relative_to(draft).as_posix() for f in draft.rglob("*") if f.is_file())
    assert files == [
        "config.json",
        "dspark/confidence_head.safetensors",
        "fit.png",
        "metrics.json",
        "model.safetensors",
    ]
    greedy = metrics["accepted_length"]["greedy"]
    assert set(greedy) == {"num_steps 1", "num_steps 3", "num_steps 5"}
    assert 1.0 <= greedy["num_steps 3"]["math"]["accepted_length"] <= 4.0
    assert json.loads(capsys.readouterr().out) == metrics["accepted_length"]
    assert set(metrics["confidence"]) == set(HEAD_RULES)
    assert metrics["head"]["bytes"] == (draft / HEAD_FILE).stat().st_size


def test_a_head_alone_leaves_its_draft_as_it_was(tmp_path: Path) -> None:
    draft, other = tmp_path / "draft", tmp_path / "other"
    run(tmp_path, draft)
    weights = (draft / "model.safetensors").read_bytes()
    metrics = run(tmp_path, other, "--head-only", draft)
    assert (draft / "model.safetensors").read_bytes() == weights
    heads = [load_file(folder / HEAD_FILE) for folder in (draft, other)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert not (other / "model.safetensors").exists() and "fit_seconds" not in metrics


def test_without_matplotlib_all_but_the_plot_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    draft = tmp_path / "draft"
    metrics = run(tmp_path, draft)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == metrics["accepted_length"]
    (line,) = (line for line in captured.err.splitlines() if "matplotlib" in line)
    assert f"{draft / 'fit.png'} is left out" in line and "pip install sglang-dspark[report]" in line
    assert (draft / HEAD_FILE).exists() and not (draft / "fit.png").exists()


def test_the_plot_is_made_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = []
    monkeypatch.setattr(pipeline, "plot_fit", lambda log, out: there.extend(out.parent.rglob("*")))
    run(tmp_path, tmp_path / "draft")
    names = {path.name for path in there}
    assert {"metrics.json", "config.json", "model.safetensors", HEAD_FILE.name} <= names


def test_the_head_learns_from_text_that_the_draft_was_not_fitted_to() -> None:
    answers, variations = [Path(f"a/{i}") for i in range(3)], [Path(f"v/{i}") for i in range(11)]
    for_draft, for_head = hold_back(answers, variations)
    assert for_head == variations[-2:] and for_draft == answers + variations[:-2]
    assert hold_back(answers, []) == (answers[:2], answers[2:])
    assert hold_back(answers, variations, 4) == (answers + variations[:-4], variations[-4:])
    assert hold_back(answers[:1], []) == (answers[:1], answers[:1])  # one shard is all there is


def test_a_split_without_prompts_to_measure_on_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_prompts(tmp_path / "gsm8k.jsonl", 3)
    arguments = ["train", "--target", "nowhere", "--prompts", prompts, "--out", tmp_path, "--left-out", 0.0]
    assert main([str(a) for a in arguments]) == 1
    assert "--left-out 0.0" in capsys.readouterr().err


FLAGS = (
    ("--workers", 0),
    ("--max-prompt-tokens", 0),
    ("--max-prompt-tokens", 5),
    ("--max-new-tokens", 1),
    ("--max-new-tokens", 250),
    ("--batches", 0),
    ("--variations", -1),
    ("--known-batches", -1),
    ("--draft-vocab", 0),
    ("--draft-vocab", VOCAB + 1),
    ("--epochs", 0),
    ("--answers-per-step", 0),
    ("--rollout-steps", 0),
    ("--sampled-share", 0),
    ("--sampled-share", 1e-9),
    ("--sampled-share", -0.5),
    ("--sampled-share", 1.5),
    ("--known-share", -0.1),
    ("--known-share", "nan"),
    ("--prompt-share", 1.1),
    ("--left-out", 0),
    ("--left-out", 1),
    ("--left-out", -1),
)


@pytest.mark.parametrize(("flag", "value"), FLAGS)
def test_a_number_out_of_its_range_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, value: object
) -> None:
    assert f"{flag} {value}".rstrip("0") in refused(tmp_path, monkeypatch, capsys, flag, value)


def test_sampled_answers_may_come_from_variations_alone(tmp_path: Path) -> None:
    class Begun(Exception):
        pass

    def begin(*_: object, **__: object) -> None:
        raise Begun

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Begun):
        patched.setattr(pipeline, "generate", begin)
        main(command(tmp_path, tmp_path / "out", "--sampled-share", 0, "--variations", 1))


def test_dialogues_longer_than_the_target_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_options(write_target(tmp_path / "target"), max_position_embeddings=100)
    said = refused(tmp_path, monkeypatch, capsys, "--variations", 1)
    assert "--max-new-tokens 12 make texts of" in said and "the target takes 100" in said


def option(**options: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        set_options(folder, **options)

    return change


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


TARGETS = (
    option(model_type="qwen3"),
    option(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5}),
    option(attention_bias=True),
    option(num_hidden_layers=5),
    option(num_hidden_layers=9),
    option(eos_token_id=None),
    cut_short,
    without_weights,
    without_config,
)


@pytest.mark.parametrize("change", TARGETS)
def test_a_target_that_cannot_be_read_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    change(write_target(tmp_path / "target"))
    said = refused(tmp_path, monkeypatch, capsys)
    assert str(tmp_path / "target") in said
    assert said.startswith("--target ") or "cannot be used" in said


DRAFTS = (
    option(num_hidden_layers=2),
    option(fc_norm=True),
    option(hidden_size=64),
    option(draft_vocab_size=None),
    cut_short,
    without_weights,
    without_config,
)


@pytest.mark.parametrize("flag", ("--head-only", "--start-from"))
@pytest.mark.parametrize("change", DRAFTS)
def test_a_draft_that_cannot_be_read_is_refused_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    change: Callable[[Path], None],
) -> None:
    target = Target(write_target(tmp_path / "target"))
    export(draft_from_target(target, torch.arange(64), torch.ones(3), seed=0), tmp_path / "draft")
    change(tmp_path / "draft")
    said = refused(tmp_path, monkeypatch, capsys, flag, tmp_path / "draft")
    assert str(tmp_path / "draft") in said


def test_a_draft_is_either_left_as_it_is_or_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(tmp_path, monkeypatch, capsys, "--head-only", "a", "--start-from", "b")
    assert "--head-only a" in said and "--start-from b" in said
