"""Greedy float32 output is token-identical to plain decoding, whatever is verified."""

import pytest

from benchmarks.launch import Server
from tests.engine.conftest import base, greedy

POLICIES = ("none", "all", "random", "depths", "pads", "rests", "own")


def check(switch, expected, prompts):
    """All 16 prompts at once under every policy; two policies also one by one, and 5 at a time as others end."""
    for policy in POLICIES:
        server = switch.to(policy)
        server.flush()
        assert greedy(server, prompts) == expected, policy
        if policy in ("random", "own"):
            assert greedy(server, prompts[::7], 1) == expected[::7], policy
            assert greedy(server, prompts, 5) == expected, policy
    assert switch.server.info()["dspark"]["faults"] == {}


LONG = pytest.mark.long  # each takes a minute: one with pages in `make test`, the others in `make test-all`


@pytest.mark.parametrize("steps", (pytest.param(1, marks=LONG), 3, pytest.param(8, marks=LONG)))
def test_greedy_output_is_plain_decoding_with_pages_of_16(switch, pairs, expected, prompts, steps, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # SGLang's paged allocator is a Triton kernel
    check(
        switch(pairs.target, pairs.eagle3, "--speculative-num-steps", str(steps), "--page-size", "16"),
        expected,
        prompts,
    )


@pytest.mark.parametrize("draft", ("eagle", pytest.param("eagle3_full", marks=LONG)))
def test_greedy_output_is_plain_decoding_with_every_kind_of_draft(switch, pairs, expected, prompts, draft):
    running = switch(pairs.target, getattr(pairs, draft), "--speculative-num-steps", "4")
    check(running, expected, prompts)
    assert running.server.info()["dspark"]["accepted"] > 0  # a draft run under the wrong algorithm accepts nothing


def test_greedy_output_is_plain_decoding_with_the_mtp_layer_of_the_target(switch, pairs, prompts):
    with Server(*base(pairs.nextn)) as plain:
        expected = greedy(plain, prompts)
    running = switch(pairs.nextn, None, "--speculative-num-steps", "3")
    check(running, expected, prompts)
    assert running.server.info()["dspark"]["accepted"] > 0


@pytest.mark.parametrize("draft", ("eagle3", pytest.param("eagle3_full", marks=LONG)))
def test_sampled_drafts_leave_greedy_requests_exact(switch, pairs, expected, prompts, draft):
    flags = ("--speculative-num-steps", "4", "--speculative-use-rejection-sampling")
    running = switch(pairs.target, getattr(pairs, draft), *flags)
    check(running, expected, prompts)


@LONG
def test_two_tensor_parallel_ranks_follow_one_plan(switch, pairs, expected, prompts, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    running = switch(pairs.target, pairs.eagle3, "--speculative-num-steps", "4", "--tp-size", "2")
    check(running, expected, prompts)
