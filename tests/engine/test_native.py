"""Native DSpark drafts: SGLang's own drafter and verify under our decisions, exact and without any offline file."""

import json
from collections import Counter

import pytest
import requests
import torch

from sglang_dspark.cost import CostTable, save_table
from sglang_dspark.engine.deployment import cost_key
from tests.engine.conftest import NEW_TOKENS, dspark, greedy, switched
from tests.engine.test_sampling import ALPHA, SAMPLES, distribution, p_value, sample

LONG = pytest.mark.long
GAMMA = 5
TOKENS = (1, 16, 96)
POLICIES = (pytest.param("none", marks=LONG), pytest.param("all", marks=LONG), "random", "depths", "own")


@pytest.fixture(scope="module")
def native(pairs, tmp_path_factory):
    """Nothing but the draft is given: overlap, profile and ragged verify as they come."""
    with switched(tmp_path_factory.mktemp("policy"), pairs.target, pairs.dspark, "--enable-metrics") as running:
        yield running


@pytest.fixture(scope="module")
def steep(pairs, resolve, tmp_path_factory):
    """Without overlap, on what is said to be a machine where a verified token is dear: 0.5 s a step and 30 ms a token.

    So much slower than any step really is, that its correction moves all of the curve alike.
    """
    folder = tmp_path_factory.mktemp("steep")
    env = {"DSPARK_COST_TABLE": str(folder / "cost.json"), "DSPARK_TRACE": str(folder / "trace")}
    flags = ("--max-total-tokens", "8192", "--max-running-requests", "16")
    save_steep(folder / "cost.json", resolve(*flags, draft=pairs.dspark))
    with dspark(pairs.target, pairs.dspark, "--disable-overlap-schedule", env=env) as server:
        server.trace = folder / "trace"
        yield server


def save_steep(path, server_args):
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    table = CostTable(TOKENS, tuple(0.5 + 0.03 * t for t in TOKENS), draft_start=0.001, free_depth=GAMMA)
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
    assert greedy(native.to("own"), prompts[::2], 3) == expected[::2]


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
    """Last on its server: SGLang's endpoint sets the share but does not take it back."""
    for share, each in ((0.4, 2), (1.0, GAMMA)):
        set_state(steep, dspark_force_budget_frac=share)
        output, grew = grown(steep, lambda: greedy(steep, prompts))
        assert output == expected
        assert grew["verified"] == each * grew["requests"]  # of 5 positions, all requests together


def set_state(server, **state):
    reply = requests.post(f"{server.url}/set_internal_state", json={"server_args": state}, timeout=60)
    assert reply.status_code == 200 and reply.json() == [True], reply.text


# -- what takes minutes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(pairs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(pairs.chi_target, dtype=torch.float32)


@pytest.fixture(scope="module", params=("overlap", "no overlap"))
def chi(request, pairs, tmp_path_factory):
    """A block of 3 on the counting target, whose drafts are sampled."""
    flags = ("--disable-radix-cache", *(("--disable-overlap-schedule",) if request.param == "no overlap" else ()))
    with switched(tmp_path_factory.mktemp("policy"), pairs.chi_target, pairs.chi_dspark, *flags) as running:
        yield running


@LONG
@pytest.mark.parametrize("policy", ("own", "random", "depths"))
def test_sampled_output_has_the_targets_distribution(chi, target, policy):
    server = chi.to(policy)
    found, grew = grown(server, lambda: sample(server, SAMPLES))
    assert p_value(found, distribution(target)) > ALPHA
    if policy == "random":
        assert 0.05 < grew["accepted"] / grew["verified"] < 0.95


@LONG
@pytest.mark.parametrize("sampling", ({"top_k": 6, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3},))
def test_sampled_output_under_filters_has_the_targets_distribution(chi, target, sampling):
    server = chi.to("random")
    found, _ = grown(server, lambda: sample(server, SAMPLES, **sampling))
    assert p_value(found, distribution(target, **sampling)) > ALPHA


@LONG
def test_the_same_test_catches_a_schedule_that_looks_at_the_sampled_token(pairs, target):
    peek = {"DSPARK_POLICY": "tests.engine.policies:PeekBeyond"}
    with dspark(pairs.chi_target, pairs.chi_dspark, "--disable-radix-cache", env=peek) as server:
        assert p_value(sample(server, SAMPLES), distribution(target)) < ALPHA
        assert server.info()["dspark"]["faults"] == {}


@LONG
@pytest.mark.parametrize("mode", ("static", "cap-accept"))
def test_the_users_verify_mode_is_sglangs_own_worker_and_exact(pairs, expected, prompts, mode):
    with dspark(pairs.target, pairs.dspark, env={"SGLANG_RAGGED_VERIFY_MODE": mode}) as server:
        replies = server.generate_all(prompts, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert [reply["output_ids"] for reply in replies] == expected
        assert "dspark" not in server.info()
        steps = sum(reply["meta_info"]["spec_verify_ct"] for reply in replies)
        assert sum(reply["meta_info"]["completion_tokens"] for reply in replies) > 1.2 * steps


@LONG
def test_sglangs_own_files_are_read(pairs, expected, prompts, tmp_path):
    sps, sts = tmp_path / "sps.json", tmp_path / "sts.json"
    rates = [1 / (0.5 + 0.03 * tokens) for tokens in TOKENS]  # as in `steep`
    sps.write_text(
        json.dumps({"sample_batch_tokens": TOKENS, "sample_steps_per_sec": rates, "max_batch_tokens": TOKENS[-1]})
    )
    sts.write_text(json.dumps({"temperatures": [1.5] * GAMMA}))
    flags = ("--speculative-dspark-sps-table-path", str(sps), "--speculative-dspark-confidence-sts-path", str(sts))
    with dspark(pairs.target, pairs.dspark, *flags) as server:
        output, grew = grown(server, lambda: greedy(server, prompts))
        assert output == expected
        cost = server.info()["dspark"]["cost"]
        assert cost["source"] == str(sps) and cost["table"]["ms"] == [530.0, 980.0, 3380.0]
        assert cost["table"]["extend_ms"][0] > 0
        assert 0 < grew["verified"] < grew["drafted"]


@LONG
def test_faults_of_ours_verify_everything(pairs, expected, prompts):
    with dspark(pairs.target, pairs.dspark, env={"DSPARK_POLICY": "tests.engine.policies:Broken"}) as server:
        assert greedy(server, prompts) == expected
        info = server.info()["dspark"]
        assert info["faults"] == {"plan": info["steps"], "allocation": info["steps"]}
        assert info["verified"] == info["drafted"] > 0


@LONG
def test_two_ranks_follow_one_plan(pairs, expected, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    with switched(tmp_path, pairs.target, pairs.dspark, "--tp-size", "2") as running:
        for policy in ("random", "depths", "own"):
            server = running.to(policy)
            output, _ = grown(server, lambda server=server: greedy(server, prompts))
            assert output == expected, policy


@LONG
def test_pages_and_retraction_keep_greedy_output(pairs, expected, prompts, tmp_path):
    env = {"SGLANG_TEST_RETRACT": "1", "TRITON_INTERPRET": "1"}
    flags = ("--page-size", "16")
    with switched(tmp_path, pairs.target, pairs.dspark, *flags, policy="random", env=env) as running:
        server = running.server
        output, _ = grown(server, lambda: greedy(server, prompts))
        assert output == expected
        server.flush()
        assert server.info()["dspark"]["pools"]["kv_free"] == 8192
