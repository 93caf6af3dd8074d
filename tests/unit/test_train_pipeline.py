"""`sglang-dspark train` from prompts to a measured draft, and its refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dspark.cli import main
from sglang_dspark.confidence.head import HEAD_FILE, HEAD_RULES
from sglang_dspark.train.pipeline import hold_back
from tests.train_tiny import write_target


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"turns": [f"what is {i} and {i}"]}) + "\n" for i in range(count)))
    return path


def run(tmp_path: Path, out: Path, *extra: object) -> dict[str, Any]:
    """`train` on a tiny target; its metrics."""
    target = tmp_path / "target"
    if not target.exists():
        write_target(target)
    prompts = write_prompts(tmp_path / "gsm8k.jsonl", 40)
    arguments = ["train", "--target", target, "--prompts", prompts, "--out", out, "--work", tmp_path / "work"]
    arguments += ["--workers", 1, "--left-out", 0.4, "--max-new-tokens", 12, "--sampled-share", 0.6]
    arguments += ["--draft-vocab", 100, "--epochs", 1, "--rollout-steps", 2, *extra]
    assert main([str(a) for a in arguments]) == 0
    return json.loads((out / "metrics.json").read_text())


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
    pytest.importorskip("matplotlib")
    draft, other = tmp_path / "draft", tmp_path / "other"
    run(tmp_path, draft)
    weights = (draft / "model.safetensors").read_bytes()
    metrics = run(tmp_path, other, "--head-only", draft)
    assert (draft / "model.safetensors").read_bytes() == weights
    heads = [load_file(folder / HEAD_FILE) for folder in (draft, other)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert not (other / "model.safetensors").exists() and "fit_seconds" not in metrics


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
