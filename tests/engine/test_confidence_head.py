"""A trained head in the serving path: found, checked before weights load, and exact whatever it says."""

import json

import pytest
import torch

from sglang_dspark.confidence.features import FEATURES
from sglang_dspark.confidence.head import HEAD_FILE, HEAD_RULES, save_head
from sglang_dspark.observe import read_trace
from tests.engine.conftest import dspark, greedy, refusal


def write_head(path, hidden, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(HEAD_RULES), 2 * hidden + len(FEATURES), generator=generator) * 0.3
    weight[:, -len(FEATURES)] += 1.0  # the draft's own log-odds, and noise on top
    save_head(path, weight, torch.zeros(len(HEAD_RULES)), hidden)


def with_head(draft, target, folder):
    """A copy of the draft with a head of noise in its folder."""
    for file in draft.iterdir():
        (folder / file.name).symlink_to(file)
    write_head(folder / HEAD_FILE, json.loads((target / "config.json").read_text())["hidden_size"])
    return folder


@pytest.fixture(scope="module")
def headed(pairs, tmp_path_factory):
    return with_head(pairs.eagle3, pairs.target, tmp_path_factory.mktemp("headed"))


@pytest.mark.parametrize("drawn", (False, pytest.param(True, marks=pytest.mark.long)))
def test_a_head_in_the_drafts_folder_is_used_and_changes_no_output(
    pairs, headed, prompts, expected, tmp_path, tmp_path_factory, drawn
):
    trace = tmp_path / "trace"
    flags = ("--speculative-use-rejection-sampling",) if drawn else ()
    if drawn:  # needs a draft over the whole vocabulary
        headed = with_head(pairs.eagle3_full, pairs.target, tmp_path_factory.mktemp("headed"))
    env = {"DSPARK_TRACE": str(trace), "DSPARK_PROFILE_SECONDS": "0"}  # without a profile every step drafts to the end
    with dspark(pairs.target, headed, "--speculative-num-steps", "4", *flags, env=env) as server:
        assert greedy(server, prompts) == expected
        assert server.info()["dspark"]["faults"] == {}
        recorded = read_trace(trace)
    assert recorded.features == (*FEATURES, "greedy", "sampled")
    shown = recorded.records["shown"][recorded.records["depth"] == 4]
    assert len(shown) and (shown[:, :, 3] != shown[:, :, 0]).any()
    assert (shown != 0).any(axis=(0, 1)).all()  # every column was written


def test_a_head_for_another_draft_is_refused_or_switched_off(resolve, pairs, headed, tmp_path, monkeypatch):
    resolve(draft=headed)
    path = tmp_path / "head.safetensors"
    write_head(path, 32)
    monkeypatch.setenv("DSPARK_CONFIDENCE_HEAD", str(path))
    sentence = refusal(lambda: resolve(draft=headed))
    assert str(path) in sentence and "hidden_size" in sentence and "DSPARK_CONFIDENCE_HEAD=off" in sentence
    path.write_bytes(b"\x80\x04not a head")
    assert "pickled" in refusal(resolve)
    monkeypatch.setenv("DSPARK_CONFIDENCE_HEAD", "off")
    resolve(draft=headed)
    monkeypatch.setenv("DSPARK_CONFIDENCE_HEAD", str(tmp_path / "none"))
    assert "is not there" in refusal(resolve)
