"""Everything a request may ask for, all in one mixed batch on a scheduled server, is what plain decoding answers."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import requests
import torch

from tests.engine.asks import ASKS, ENDLESS, GREEDY, ask, same
from tests.engine.conftest import switched
from tests.tiny.checkpoint import AUX_LAYERS

FLAGS = ("--speculative-num-steps", "4", "--enable-return-hidden-states", "--enable-priority-scheduling")
POLICIES = ("none", "random", "rests", "own")


@pytest.fixture(scope="module")
def switch(pairs, tmp_path_factory):
    flags = (*FLAGS, "--enable-custom-logit-processor")
    with switched(tmp_path_factory.mktemp("policy"), pairs.target, pairs.eagle3, *flags) as it:
        yield it


@pytest.fixture(scope="module")
def wanted(plain, prompts):
    """By plain decoding, of each ask in turn; what each does is seen in it."""
    answers = {name: ask(plain, prompts[i], body) for i, (name, body) in enumerate(ASKS.items())}
    for i, (name, body) in enumerate(ASKS.items()):
        params = body["sampling_params"]
        if name in ("plain", "logprobs", "n", "stream"):
            continue
        unasked = ask(plain, prompts[i], {"sampling_params": {k: params[k] for k in ENDLESS if k in params}})
        assert answers[name]["output_ids"] != unasked["output_ids"], f"{name} asks for nothing here"
    return answers


def check_mixed(server, wanted, prompts):
    """All asks at once, and sampled ones beside them, are answered as by plain decoding."""
    server.flush()
    sampled = [
        {"sampling_params": {**ENDLESS, "temperature": 0.8, **filters}} for filters in ({}, {"top_k": 5, "min_p": 0.1})
    ]
    bodies = [(name, {**body, "priority": i % 3}) for i, (name, body) in enumerate(ASKS.items())]
    with ThreadPoolExecutor(2 * len(bodies)) as pool:
        beside = [pool.submit(ask, server, prompts[0], body) for body in sampled]
        answers = [
            (name, pool.submit(ask, server, prompts[i], body))
            for _ in range(2)  # the second ones meet the first ones' prefixes in the radix cache, and other neighbours
            for i, (name, body) in enumerate(bodies)
            if not (_ and "logprob" in name)  # SGLang computes input log-probabilities of what is not cached
        ]
        wrong = [name for name, answer in answers if not same(answer.result(), wanted[name])]
        assert [len(answer.result()["output_ids"]) for answer in beside] == [ENDLESS["max_new_tokens"]] * 2
    assert wrong == []


def check_stop_strings(server, plain, prompts):
    """Of two stop strings the one said first ends a request, wherever it stands in the list."""
    seen = 0
    for prompt in prompts:
        words = ask(plain, prompt, {"sampling_params": ENDLESS})["text"].split()
        for first, second in zip(words[4:12:2], words[5:13:2], strict=False):
            body = {"sampling_params": {**GREEDY, "ignore_eos": True, "stop": [second, first]}}
            wanted, got = ask(plain, prompt, body), ask(server, prompt, body)
            assert same(got, wanted)
            seen += wanted["meta_info"]["finish_reason"]["matched"] == first
    assert seen > 20


@pytest.mark.parametrize("policy", POLICIES)
def test_each_ask_is_answered_as_without_speculation_in_one_mixed_batch(switch, wanted, prompts, policy):
    server = switch.to(policy)
    check_mixed(server, wanted, prompts)
    info = server.info()["dspark"]
    assert info["faults"] == {} and info["verified"] >= (policy != "none")


def test_of_two_stop_strings_in_one_run_the_one_said_first_ends_it(switch, plain, prompts):
    check_stop_strings(switch.to("all"), plain, prompts)


def test_hidden_states_are_those_of_the_accepted_tokens(switch, pairs, prompts):
    """As with SGLang's EAGLE3: of each token after the first the streams that the draft reads."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(pairs.target, dtype=torch.float32, attn_implementation="eager")
    server = switch.to("random")
    for prompt in prompts[6:12]:
        answer = ask(server, prompt, {"sampling_params": ENDLESS, "return_hidden_states": True})
        output = answer["output_ids"]
        rows = torch.tensor(answer["meta_info"]["hidden_states"][1:])  # the first entry is the prompt's
        with torch.no_grad():
            states = model(torch.tensor([prompt + output[:-1]]), output_hidden_states=True).hidden_states
        streams = torch.cat([states[layer + 1][0, len(prompt) :] for layer in AUX_LAYERS], dim=-1)
        assert len(rows) == len(output) - 1 and torch.allclose(rows, streams, atol=1e-3)


def test_what_sglangs_eagle_path_refuses_stays_refused_with_its_own_words(switch, prompts):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_sampling_mask import validate_spec_sampling_mask_request

    server = switch.to("own")
    mask = validate_spec_sampling_mask_request(SimpleNamespace(), SpeculativeAlgorithm.EAGLE3)
    beams = "Beam search is not supported with speculative decoding."
    for body, words in (
        ({"sampling_params": ENDLESS, "return_sampling_mask": True}, mask),
        ({"sampling_params": {**ENDLESS, "beam_width": 2}}, beams),
    ):
        reply = requests.post(f"{server.url}/generate", json={"input_ids": prompts[0], **body}, timeout=60)
        assert reply.status_code == 400 and words in reply.text


def test_adapters_are_refused_where_sglangs_eagle3_refuses_them(resolve, monkeypatch):
    """Otherwise they are let through, as for EAGLE3; SGLang's own adapter code needs pinned memory, so a GPU."""
    from sglang.srt.arg_groups.lora_hook import check_lora_speculative_compatibility

    server_args = resolve()
    check_lora_speculative_compatibility(server_args)
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    with pytest.raises(ValueError, match="LoRA with EAGLE/NEXTN/EAGLE3 speculative decoding does not support"):
        check_lora_speculative_compatibility(server_args)
