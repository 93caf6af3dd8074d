"""Stock SGLang on the stand-in CPU operations, without DSPARK: every path gives transformers' own greedy output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.launch import CPU_FLAGS, Server
from tests.engine.conftest import NEW_TOKENS, base, greedy

EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3")
CHAIN = (*EAGLE3, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
TREE = (*EAGLE3, "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")


@pytest.fixture(scope="module")
def by_transformers(pairs, prompts) -> list[list[int]]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(pairs.target, dtype=torch.float32, attn_implementation="eager")
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), do_sample=False, **length)[0, len(ids) :].tolist() for ids in prompts]


def test_plain_decoding_is_what_transformers_generates(expected, by_transformers):
    assert expected == by_transformers


def test_chunked_prefill_beside_decoding_and_radix_hits_change_nothing(pairs, prompts, by_transformers):
    with Server(*base(pairs.target), "--chunked-prefill-size", "32", "--enable-mixed-chunk") as server:
        assert greedy(server, prompts) == by_transformers
        replies = server.generate_all(prompts, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert [reply["output_ids"] for reply in replies] == by_transformers
        assert sum(reply["meta_info"]["cached_tokens"] for reply in replies) > 0


def test_stock_eagle3_chain_with_pages_of_16_changes_nothing(pairs, prompts, by_transformers):
    draft = ("--speculative-draft-model-path", str(pairs.eagle3))
    interpret = {"TRITON_INTERPRET": "1"}  # SGLang's paged allocator is a Triton kernel
    with Server(*base(pairs.target), *CHAIN, *draft, "--page-size", "16", env=interpret) as server:
        assert greedy(server, prompts) == by_transformers
        reply = server.generate(prompts[0], temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert reply["meta_info"]["spec_accept_length"] > 1.3, "a draft that is never accepted would test nothing"


ENGINE = """
import json, sys
import sglang
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    prompts, new_tokens = json.loads(sys.argv[1])
    engine = sglang.Engine(server_args=prepare_server_args(sys.argv[2:]))
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    replies = engine.generate(input_ids=prompts, sampling_params=sampling)
    print("RESULT", json.dumps([[r["output_ids"], r["meta_info"]["spec_accept_length"]] for r in replies]))
    engine.shutdown()
"""


def test_stock_eagle3_tree_through_the_offline_engine_changes_nothing(pairs, prompts, by_transformers, tmp_path: Path):
    """Trees use the mask, the sibling links and the KV moves; the engine spawns its processes from a user's script."""
    script = tmp_path / "offline.py"
    script.write_text(ENGINE)
    arguments = [*CPU_FLAGS, *base(pairs.target), *TREE, "--speculative-draft-model-path", str(pairs.eagle3)]
    command = [sys.executable, str(script), json.dumps([prompts, NEW_TOKENS]), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    outputs, accepted = zip(*json.loads(lines[0].removeprefix("RESULT ")), strict=True)
    assert list(outputs) == by_transformers
    assert sum(accepted) / len(accepted) > 1.3
