"""Everything that a request may ask for, as /generate bodies without a prompt, and how two answers are compared."""

import json

import pytest
import requests
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from benchmarks.launch import Server

NEW_TOKENS = 40
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
ENDLESS = {**GREEDY, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["baba", "dedi"]}, "known": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["mood", "known", "n"],
    "additionalProperties": False,
}
# Log-probabilities are of float32 logits whose rounding differs with the shape of a batch: 6e-6 was seen.
TOLERANCE = 1e-4


class NothingTwice(CustomLogitProcessor):
    """Bans whatever the request said in its last ten tokens: it must know them all, whatever a step verified."""

    def __call__(self, logits, custom_param_list):
        for row, params in zip(logits, custom_param_list, strict=True):
            row[params["__req__"].output_ids[-10:]] = -1e9
        return logits


class NeverThese(CustomLogitProcessor):
    """Bans every third token, whatever was said."""

    def __call__(self, logits, custom_param_list):
        logits[:, ::3] = -1e9
        return logits


ASKS = {
    "plain": {"sampling_params": ENDLESS},
    "logprobs": {
        "sampling_params": ENDLESS, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3,
        "token_ids_logprob": [20, 30],
    },
    "json schema": {"sampling_params": {**GREEDY, "json_schema": json.dumps(SCHEMA)}},
    "regex": {"sampling_params": {**GREEDY, "regex": "(ba|de|du ){3,12}"}, "return_logprob": True},
    "frequency penalty": {"sampling_params": {**ENDLESS, "frequency_penalty": 0.7}},
    "presence penalty": {"sampling_params": {**ENDLESS, "presence_penalty": 0.9}},
    "repetition penalty": {"sampling_params": {**ENDLESS, "repetition_penalty": 1.2}},
    "logit bias": {"sampling_params": {**ENDLESS, "logit_bias": {"300": 6.0, "343": -100.0}}},
    "custom logit processor": {
        "sampling_params": {**ENDLESS, "custom_params": {}}, "custom_logit_processor": NothingTwice.to_str(),
    },
    # The space before a syllable comes in the first words, so that without the bar these end at once.
    "min tokens": {"sampling_params": {**GREEDY, "min_new_tokens": 17, "stop_token_ids": list(range(320, 380))}},
    "stop string": {"sampling_params": {**GREEDY, "stop": ["na", "ko", "te"]}},
    "stop token": {"sampling_params": {**GREEDY, "stop_token_ids": list(range(290, 310))}},
    "n": {"sampling_params": {**ENDLESS, "n": 3}},
    "stream": {"sampling_params": ENDLESS, "stream": True},
}  # fmt: skip


def ask(server: Server, prompt: list[int], body: dict) -> dict | list:
    """One /generate request; of a stream its last chunk, which has everything."""
    reply = requests.post(f"{server.url}/generate", json={"input_ids": prompt, **body}, timeout=600, stream=True)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()
    chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith(b"data: {")]
    assert len(chunks) > 3
    return chunks[-1]


def same(got: dict | list, wanted: dict | list) -> bool:
    """Whether two answers are the same: tokens, text, why they end, and log-probabilities within the tolerance."""
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(same(g, w) for g, w in zip(got, wanted, strict=True))
    parts = [
        (got["output_ids"], wanted["output_ids"]),
        (got["text"], wanted["text"]),
        (got["meta_info"]["finish_reason"], wanted["meta_info"]["finish_reason"]),
    ]
    parts += [
        (flat(got["meta_info"][name]), flat(wanted["meta_info"][name]))
        for name in wanted["meta_info"]
        if name.endswith("logprobs")
    ]
    return all(g == (pytest.approx(w, abs=TOLERANCE) if isinstance(w, list) else w) for g, w in parts)


def flat(nested: object) -> list:
    if not isinstance(nested, (list, tuple)):
        return [-1.0 if nested is None else nested]
    return [leaf for part in nested for leaf in flat(part)]
