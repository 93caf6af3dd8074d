"""Native DSpark drafts: SGLang's own drafter and verify under our decisions, exact and without any offline file."""

import json
import subprocess
from collections import Counter

import pytest
import requests
import torch

from benchmarks.launch import Server
from sglang_dspark.cost import CostTable, save_table
from sglang_dspark.engine.deployment import cost_key
from tests.engine.conftest import Switch, base, dspark, greedy, refusal
from tests.engine.test_sampling import ALPHA, FILTERS, SAMPLES, distribution, p_value, sample

LONG = pytest.mark.long
GAMMA = 5
POLICIES = ("none", "all", "random", "depths", "own")


def switched(file, policy="own"):
    file.write_text(policy)
    return {"DSPARK_POLICY": "tests.engine.policies:Switch", "TEST_POLICY_FILE": str(file)}


@pytest.fixture(scope="module")
def native(pairs, tmp_path_factory):
    """Nothing but the draft is given: overlap, profile and ragged verify as they come."""
    file = tmp_path_factory.mktemp("policy") / "policy"
    with dspark(pairs.target, pairs.dspark, "--enable-metrics", env=switched(file)) as server:
        yield Switch(server, file)


@pytest.fixture(scope="module")
def steep(pairs, resolve, tmp_path_factory):
    """Without overlap, on a machine where a verified token is dear: 20 ms a step and 5 ms a token."""
    folder = tmp_path_factory.mktemp("steep")
    env = {"DSPARK_COST_TABLE": str(folder / "cost.json"), "DSPARK_TRACE": str(folder / "trace")}
    flags = ("--max-total-tokens", "8192", "--max-running-requests", "16")
    save_steep(folder / "cost.json", resolve(*flags, draft=pairs.dspark))
    with dspark(pairs.target, pairs.dspark, "--disable-overlap-schedule", env=env) as server:
        server.trace = folder / "trace"
        yield server


def save_steep(path, server_args):
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    tokens = (1, 16, 96)
    table = CostTable(tokens, tuple(0.020 + 0.005 * t for t in tokens), draft_start=0.001, free_depth=GAMMA)
    save_table(path, cost_key(resolved_view(server_args), model_config_of(server_args)), table)


def grown(server, run):
    """What the counters grew by while ``run`` ran, and what it gave."""
    before = server.info()["dspark"]
    result = run()
    after = server.info()["dspark"]
    assert after["faults"] == {}
    numbers = {k: v - before.get(k, 0) for k, v in after.items() if isinstance(v, int)}
    return result, {**numbers, "modes": Counter(after["modes"]) - Counter(before["modes"])}


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_plain_decoding_with_overlap(native, expected, prompts, policy):
    server = native.to(policy)
    server.flush()
    output, grew = grown(server, lambda: greedy(server, prompts))
    assert output == expected
    assert grew["target_tokens"] == grew["requests"] + grew["verified"]
    assert grew["verified"] <= grew["drafted"] and grew["accepted"] <= grew["verified"]
    assert grew["produced"] == grew["accepted"] + grew["requests"]
    if policy == "none":
        assert grew["verified"] == 0
    if policy == "all":
        assert grew["verified"] == GAMMA * grew["requests"] and 0.1 < grew["accepted"] / grew["verified"] < 0.9
    if policy == "depths":  # a block makes all positions or none, and at depth 0 the draft does not run
        assert set(server.info()["dspark"]["depths"]) == {"0", str(GAMMA)}


def test_fewer_users_leave_and_others_come(native, expected, prompts):
    server = native.to("own")
    assert greedy(server, prompts, 5) == expected
    assert greedy(server, prompts[::7], 1) == expected[::7]


def test_no_offline_file_is_needed(native):
    info = native.server.info()["dspark"]
    assert info["cost"]["source"] == "profile" and info["cost"]["samples"] > 0
    assert info["cost"]["table"]["extend_ms"][0] > 0  # what a block costs
    log = native.server.log.read_text()
    assert "SPS table is uninitialized" not in log
    assert "mode=compact" in log


def test_the_same_numbers_stand_at_metrics(native):
    text = requests.get(f"{native.server.url}/metrics", timeout=60).text
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[:7] == "dspark:"}
    info = native.server.info()["dspark"]
    assert found["dspark:verified_total"] == info["verified"] and found["dspark:steps_total"] == info["steps"]


def test_no_kv_slot_is_lost(native):
    server = native.server
    server.flush()
    pools = server.info()["dspark"]["pools"]
    assert pools == {"kv_free": 8192, "requests_free": 16}


def test_under_a_steep_cost_less_than_everything_is_verified(steep, expected, prompts):
    output, grew = grown(steep, lambda: greedy(steep, prompts))
    assert output == expected
    assert grew["modes"]["scheduled"] > 0.2 * grew["steps"], grew
    assert 0 < grew["verified"] < 0.6 * grew["drafted"], grew
    # It is the more certain half that was chosen: under verify-all about a third is accepted.
    assert grew["accepted"] / grew["verified"] > 0.55, grew


def test_what_was_accepted_corrects_the_confidence(steep):
    from sglang_dspark.observe.trace import read_trace

    trace = read_trace(steep.trace)
    assert trace.gamma == GAMMA and trace.features == ("head",)
    records = trace.records[trace.records["depth"] > 0]
    shown = torch.from_numpy(records["shown"][:, :, 0].copy())
    raw, used = shown.sigmoid(), torch.from_numpy(records["confidence"].copy())
    first = records["step"] == records["step"].min()
    assert torch.allclose(raw[torch.from_numpy(first)], used[torch.from_numpy(first)], atol=1e-4)
    assert (raw - used)[-50:].abs().mean() > 0.01


def test_a_forced_budget_is_used_without_sglangs_table(steep, prompts, expected):
    set_state(steep, dspark_force_budget_frac=0.4)
    output, grew = grown(steep, lambda: greedy(steep, prompts))
    assert output == expected
    assert grew["verified"] == sum(2 * n for n in [grew["requests"]])  # 0.4 of 5 positions, all requests together
    set_state(steep, dspark_force_budget_frac=None)
    _, grew = grown(steep, lambda: greedy(steep, prompts))
    assert grew["modes"]["no_draft"] + grew["modes"]["verify_all"] + grew["modes"]["scheduled"] == grew["steps"]


def set_state(server, **state):
    reply = requests.post(f"{server.url}/set_internal_state", json={"server_args": state}, timeout=60)
    assert reply.status_code == 200 and reply.json()[0]["updated"], reply.text
