"""Plots need matplotlib, an extra of the package: what does not depend on one is done without it."""

import json
import sys
from pathlib import Path

import pytest

from sglang_dspark.cli import main
from sglang_dspark.train.plot import plot_fit


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({"steps": [{"loss": 2.0 - i, "acceptance": [0.5, 0.25]} for i in range(2)]}))
    return path


def test_a_fit_is_drawn(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot_fit(log, tmp_path / "fit.png")
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG") and capsys.readouterr().err == ""


def test_without_matplotlib_a_line_says_how_to_get_it(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot_fit(log, tmp_path / "fit.png")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "fit.png is left out" in said and "pip install sglang-dspark[report]" in said
    assert not (tmp_path / "fit.png").exists()


def test_calibrate_refuses_a_plot_it_cannot_draw_before_it_reads_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out, plot = tmp_path / "c.json", tmp_path / "p.png"
    arguments = ["calibrate", "--trace", tmp_path / "none", "--out", out, "--plot", plot]
    assert main([str(argument) for argument in arguments]) == 1
    said = capsys.readouterr().err
    assert f"--plot {plot} needs matplotlib" in said and said.count("\n") == 1
    assert "pip install sglang-dspark[report]" in said and not out.exists()
