"""SGLang's overlap schedule: a step is launched before the outcome of the one before it is known."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.engine.conftest import NEW_TOKENS, free, greedy, switched

OVERLAP = {"DSPARK_CPU_OVERLAP": "1", "TRITON_INTERPRET": "1"}
POLICIES = ("none", "all", "random", "budgets", "depths", "pads", "rests", "own")


def start(pairs, folder, *args, **env):
    flags = ("--speculative-num-steps", "4", "--chunked-prefill-size", "32", *args)
    return switched(folder, pairs.target, pairs.eagle3, *flags, env={**OVERLAP, **env})


@pytest.fixture(scope="module")
def overlap(pairs, tmp_path_factory):
    with start(pairs, tmp_path_factory.mktemp("overlap")) as running:
        assert not running.server.info()["disable_overlap_schedule"]
        yield running


@pytest.fixture(scope="module")
def empty(overlap):
    """What is free before the first request."""
    return free(overlap.server)


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_plain_decoding_while_steps_overlap(overlap, empty, expected, prompts, policy):
    server = overlap.to(policy)
    server.flush()
    assert greedy(server, prompts[::2], 5) == expected[::2]  # batches that requests join and leave
    assert server.info()["dspark"]["faults"] == {}
    assert free(server) == empty


def test_every_step_has_its_own_outcome_although_requests_are_aborted_in_between(overlap, empty, prompts, expected):
    server = overlap.to("random")
    before = server.info()["dspark"]

    def one(i):
        rid = f"overlap-{i}."  # SGLang aborts every request whose id begins with the one given
        body = {"rid": rid, "input_ids": prompts[i % 16], "sampling_params": {"temperature": 0, "max_new_tokens": 60}}
        body["sampling_params"]["ignore_eos"] = True
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=300)
            if i % 3 == 0:
                time.sleep(0.05 * (i % 7))
                requests.post(f"{server.url}/abort_request", json={"rid": rid}, timeout=60)
            tokens = reply.result().json().get("output_ids", [])[:NEW_TOKENS]
            return tokens == expected[i % 16][: len(tokens)]

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(one, range(24)))
    assert free(server) == empty
    after = server.info()["dspark"]
    launched = sum(after["depths"].values()) - sum(before["depths"].values())
    assert after["steps"] - before["steps"] == launched > 0
    # Would not hold if a step were settled with the verify lengths of another.
    assert after["target_tokens"] - before["target_tokens"] == sum(
        after[key] - before[key] for key in ("requests", "verified")
    )
    assert after["faults"] == {}


def test_outcomes_are_learnt_from(overlap, prompts):
    # Priors start at .8 and would stay there.
    server = overlap.to("own")
    greedy(server, prompts)
    info = server.info()["dspark"]
    assert info["prior"]["greedy"][0] != pytest.approx(0.8, abs=1e-3)
    assert 0 < info["accepted"] <= info["verified"]


@pytest.mark.long
@pytest.mark.parametrize("how", ("retraction", "pages of 16", "mixed chunks"))
def test_overlap_with(pairs, prompts, expected, tmp_path, how):
    args = {"retraction": [], "pages of 16": ["--page-size", "16"], "mixed chunks": ["--enable-mixed-chunk"]}[how]
    with start(pairs, tmp_path, *args, SGLANG_TEST_RETRACT=str(int(how == "retraction"))) as running:
        server = running.server
        before = free(server)
        for policy in ("budgets", "rests", "own"):
            running.to(policy)
            assert greedy(server, prompts) == expected, policy
            assert greedy(server, prompts, 5) == expected, policy
        assert free(server) == before
        assert server.info()["dspark"]["faults"] == {}
