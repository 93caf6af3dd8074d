"""Conditions from public reports on how a server is started."""

import shutil

import pytest
from sglang.srt.arg_groups.overrides import resolved_view

from tests.engine.conftest import refusal


@pytest.fixture(scope="module")
def weightless(pairs, tmp_path_factory):
    """The target and its draft without their weights: whatever needs those fails in another way."""
    root = tmp_path_factory.mktemp("weightless")
    return [
        shutil.copytree(folder, root / folder.name, ignore=shutil.ignore_patterns("*.safetensors"))
        for folder in (pairs.target, pairs.eagle3)
    ]


@pytest.mark.parametrize(
    "name, value",
    [
        ("DSPARK_PROFILE_SECONDS", "soon"),
        ("DSPARK_PROFILE_SECONDS", "nan"),
        ("DSPARK_POLICY", "x"),
        ("DSPARK_CPU_OVERLAP", "yes"),
        ("DSPARK_CPU_OVERLAP", "1"),  # without TRITON_INTERPRET=1
        ("DSPARK_TRACE", "/no/such/folder/trace"),
        ("DSPARK_CONFIDENCE_HEAD", "/no/such/head"),
        ("DSPARK_TYPO", "1"),
    ],
)
def test_c10_a_wrong_option_of_the_scheduler_is_refused_before_weights_load(
    resolve, weightless, monkeypatch, name, value
):
    target, draft = weightless
    resolve(target=target, draft=draft)
    monkeypatch.setenv(name, value)
    assert name in refusal(lambda: resolve(target=target, draft=draft))


@pytest.mark.parametrize("steps", (1, 2, 7, 16))
def test_c15_the_number_of_steps_that_the_user_gives_is_the_one_used(resolve, steps):
    view = resolved_view(resolve("--speculative-num-steps", str(steps)))
    assert (view.speculative_num_steps, view.speculative_num_draft_tokens) == (steps, steps + 1)
    view = resolved_view(resolve("--speculative-num-draft-tokens", str(steps + 1)))
    assert (view.speculative_num_steps, view.speculative_num_draft_tokens) == (steps, steps + 1)
