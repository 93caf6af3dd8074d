"""`sglang-dspark train` from prompts to a measured draft, and its refusals."""

import json
from pathlib import Path

import pytest

from sglang_dspark.cli import main
from tests.train_tiny import write_target


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"turns": [f"what is {i} and {i}"]}) + "\n" for i in range(count)))
    return path


def test_train_leaves_a_draft_with_its_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = write_target(tmp_path / "target")
    prompts = write_prompts(tmp_path / "gsm8k.jsonl", 12)
    arguments = ["train", "--target", target, "--prompts", prompts, "--out", tmp_path / "draft"]
    arguments += ["--work", tmp_path / "work", "--workers", 1, "--left-out", 0.4, "--max-new-tokens", 12]
    arguments += ["--draft-vocab", 100, "--epochs", 1, "--rollout-steps", 2]
    assert main([str(a) for a in arguments]) == 0
    assert sorted(f.name for f in (tmp_path / "draft").iterdir()) == [
        "config.json",
        "fit.png",
        "metrics.json",
        "model.safetensors",
    ]
    metrics = json.loads((tmp_path / "draft/metrics.json").read_text())
    greedy = metrics["accepted_length"]["greedy"]
    assert set(greedy) == {"num_steps 1", "num_steps 3", "num_steps 5"}
    assert 1.0 <= greedy["num_steps 3"]["math"]["accepted_length"] <= 4.0
    assert metrics["prompts"]["left_out"]["gsm8k"] + metrics["data"]["answers"] >= 12
    assert json.loads(capsys.readouterr().out) == metrics["accepted_length"]


def test_a_split_without_prompts_to_measure_on_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_prompts(tmp_path / "gsm8k.jsonl", 3)
    arguments = ["train", "--target", "nowhere", "--prompts", prompts, "--out", tmp_path, "--left-out", 0.0]
    assert main([str(a) for a in arguments]) == 1
    assert "--left-out 0.0" in capsys.readouterr().err
