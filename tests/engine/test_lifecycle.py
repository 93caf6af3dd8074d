"""Requests that end, stop, wait, stream, are aborted or thrown back: right output, and every KV slot comes back."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.launch import Server
from tests.engine.conftest import NEW_TOKENS, base, dspark, free, greedy


@pytest.fixture(scope="module")
def server(pairs):
    running = dspark(
        pairs.target,
        pairs.eagle3,
        "--speculative-num-steps",
        "4",
        "--chunked-prefill-size",
        "32",
        "--enable-mixed-chunk",
        "--enable-metrics",
    )
    with running:
        yield running


def test_chunked_prefill_and_radix_hits_change_nothing(server, expected, prompts):
    server.flush()
    assert greedy(server, prompts) == expected
    assert greedy(server, prompts) == expected  # now every prefix is in the radix cache


def test_end_of_sequence_inside_an_accepted_run_ends_there(server, plain, prompts, expected):
    # Stop at a token that plain decoding produces in mid-run, so that runs of accepted drafts reach across it.
    for prompt, output in zip(prompts[::3], expected[::3], strict=True):
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "stop_token_ids": [output[17]]}
        wanted, got = (it.generate(prompt, **sampling) for it in (plain, server))
        assert got["output_ids"] == wanted["output_ids"]
        assert got["meta_info"]["finish_reason"] == wanted["meta_info"]["finish_reason"]
        assert got["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("length", (1, 2, 3, 7))
def test_length_limit_cuts_an_accepted_run(server, prompts, expected, length):
    reply = server.generate(prompts[0], temperature=0, max_new_tokens=length, ignore_eos=True)
    assert reply["output_ids"] == expected[0][:length]


def test_streaming_gives_the_same_tokens(server, prompts, expected):
    body = {
        "input_ids": prompts[5],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    chunks = [
        json.loads(line[6:])
        for line in requests.post(f"{server.url}/generate", json=body, stream=True, timeout=120).iter_lines()
        if line.startswith(b"data: {")
    ]
    assert len(chunks) > 5
    assert chunks[-1]["output_ids"] == expected[5]


def test_requests_that_join_and_leave_do_not_disturb_each_other(server, prompts, expected):
    def one(i):
        time.sleep(0.03 * i)
        length = 10 + 19 * i % 30
        reply = server.generate(prompts[i % 16], temperature=0, max_new_tokens=length, ignore_eos=True)
        return reply["output_ids"] == expected[i % 16][:length]

    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(one, range(40)))


def test_a_thousand_requests_with_aborts_give_every_slot_back(server, prompts, expected):
    before = free(server)
    random = Random(2)

    def one(i):
        # SGLang aborts every request whose id starts with the one it is given: "leak-4" would take "leak-42" along.
        rid, prompt, length = f"leak-{i}.", prompts[i % 16], random.randrange(1, 40)
        body = {
            "rid": rid,
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": True},
        }
        if i % 4 == 0:  # the client aborts it
            with ThreadPoolExecutor(1) as pool:
                reply = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=300)
                time.sleep(random.random() * 0.2)
                requests.post(f"{server.url}/abort_request", json={"rid": rid}, timeout=60)
                tokens = reply.result().json()
                tokens = tokens.get("output_ids", []) if isinstance(tokens, dict) else []
            return tokens, expected[i % 16][: len(tokens)]
        if i % 4 == 1:  # the client goes away
            with suppress(requests.RequestException):
                requests.post(f"{server.url}/generate", json=body | {"stream": True}, timeout=0.3, stream=True).close()
            return [], []
        reply = requests.post(f"{server.url}/generate", json=body, timeout=300).json()
        return reply["output_ids"], expected[i % 16][:length]

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(1000)))
    wrong = {i: (got, wanted) for i, (got, wanted) in enumerate(answers) if got != wanted}
    assert wrong == {}
    assert free(server) == before
    assert server.info()["dspark"]["faults"] == {}


def test_metrics_stand_beside_sglangs_own_under_the_same_labels(server, prompts):
    before = server.info()["dspark"]
    greedy(server, prompts[:4])
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    samples = {}
    for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
        samples.setdefault(sample.name, []).append(sample)
    after = server.info()["dspark"]
    ours = samples["dspark:steps_total"]
    assert len(ours) == 1 and ours[0].labels == samples["sglang:num_running_reqs"][0].labels
    assert before.get("steps", 0) < ours[0].value <= after["steps"]
    assert sum(s.value for s in samples["dspark:accepted_length_total"]) == after["requests"]
    assert samples["dspark:accepted_total"][0].value == after["accepted"]
    assert sum(s.value for s in samples["dspark:mode_total"]) == ours[0].value


def test_retraction_changes_nothing(pairs, prompts, expected):
    with dspark(pairs.target, pairs.eagle3, "--speculative-num-steps", "4", env={"SGLANG_TEST_RETRACT": "1"}) as server:
        before = free(server)
        replies = server.generate_all(prompts, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert [reply["output_ids"] for reply in replies] == expected
        assert sum(reply["meta_info"]["num_retractions"] for reply in replies) > 0
        assert free(server) == before


def test_a_fault_of_ours_is_counted_and_stops_no_request(pairs, prompts, expected):
    with dspark(pairs.target, pairs.eagle3, env={"DSPARK_POLICY": "tests.engine.policies:Broken"}) as server:
        assert greedy(server, prompts) == expected
        faults = server.info()["dspark"]["faults"]
        assert faults["plan"] > 0 and faults["allocation"] > 0


def test_other_algorithms_run_without_our_worker(pairs, prompts, expected):
    stock = Server(
        *base(pairs.target),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(pairs.eagle3)),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    )
    with stock as server:
        assert greedy(server, prompts) == expected
        assert "dspark" not in server.info()
