"""Batches under LoRA adapters: SGLang tells whose token is whose by rows of one length, so rows have one length."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.launch import Server
from sglang_dspark.engine import worker as worker_module
from sglang_dspark.engine.requests import has_adapters
from sglang_dspark.engine.worker import DSparkWorker, even
from sglang_dspark.schedule import Plan
from tests.engine.asks import ENDLESS, ask
from tests.engine.conftest import base, switched

ADAPTED = {"q_proj": (64, 64), "v_proj": (64, 32)}  # of the tiny target: inputs and outputs
ROOT = Path(__file__).parents[2]
UNPINNED = {"PYTHONPATH": f"{ROOT / 'tests/engine/unpinned'}{os.pathsep}{ROOT}"}


def batch(*adapters):
    info = SimpleNamespace(custom_logit_processor=None, is_all_greedy=False, acc_additive_penalties=None)
    info.acc_scaling_penalties = info.logit_bias = None
    info.has_custom_logit_processor = info.has_watermark_candidates = False
    mode = SimpleNamespace(is_idle=lambda: False)
    spec = SimpleNamespace(retrieve_next_token=torch.ones(len(adapters), 4), draft_probs=None)
    reqs = [SimpleNamespace(lora_id=adapter) for adapter in adapters]
    return SimpleNamespace(
        reqs=reqs, sampling_info=info, forward_mode=mode, seq_lens=torch.zeros(len(reqs)), spec_info=spec
    )


@pytest.mark.parametrize("budget, depth", ((0, 0), (1, 1), (4, 1), (5, 2), (20, 5)))
def test_the_plan_gives_every_request_the_same_budget_rounded_up(budget, depth):
    plan = even(Plan(5, budget, "scheduled", 5.0, 0.01, 500.0), 4)
    assert (plan.depth, plan.budget) == (depth, 4 * depth)


def test_one_adapter_is_enough():
    assert has_adapters(batch(None, "a", None)) and not has_adapters(batch(None, None))


@pytest.mark.parametrize("adapter", (None, "a"))
def test_under_adapters_the_target_sees_whole_rows_whatever_was_allocated(monkeypatch, adapter):
    it, described = object.__new__(DSparkWorker), batch(None, adapter)
    it._plan, it._batch = Plan(3, 4, "scheduled", 5.0, 0.01, 500.0), SimpleNamespace()
    it._draft_worker = SimpleNamespace(shown=torch.zeros(2, 5, 3))
    it.gamma, it.topk, it.device, it.plan_stream, it.plan_stream_ctx = 5, 1, "cpu", None, None
    it.req_to_token_pool = it.token_to_kv_pool_allocator = None
    it._target_worker = SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=None))
    it.faults = SimpleNamespace(run=lambda part, action, _: action() if part == "allocation" else None)
    it._allocate = lambda *_: (None, torch.tensor([2, 4], dtype=torch.int32))
    it.agreement = SimpleNamespace(lengths=lambda lens: lens)
    it.policy = None
    seen = {}

    def verify(given, *, target_worker, **_):
        seen["rows"] = given.spec_info.dspark_rows
        return SimpleNamespace()

    monkeypatch.setattr(worker_module, "run_eagle_verify", verify)
    result = it.verify(described)
    if adapter:
        assert seen["rows"].kept is None  # the layout only says how wide the rows are
        assert seen["rows"].widest == 4  # which is what SGLang's LoRA is told
        assert result.cap_lens.tolist() == [4, 4]
    else:
        assert seen["rows"].layout.verify_lens_cpu == [2, 4] and result.cap_lens.tolist() == [2, 4]


def save_adapter(folder: Path, seed: int) -> Path:
    """A random adapter that changes what the tiny target says."""
    random, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(4):
        for name, (inputs, outputs) in ADAPTED.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = torch.randn(4, inputs, generator=random) / 8
            weights[f"{where}.lora_B.weight"] = torch.randn(outputs, 4, generator=random) * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(ADAPTED), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def answers(server: Server, prompts: list[list[int]], adapters: tuple[str | None, ...]) -> list[list[int]]:
    """Greedy tokens of all prompts at once, under the adapters by turn."""

    def one(asked: tuple[int, list[int]]) -> list[int]:
        number, prompt = asked
        return ask(server, prompt, {"sampling_params": ENDLESS, "lora_path": adapters[number % len(adapters)]})[
            "output_ids"
        ]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, enumerate(prompts)))


def test_greedy_output_is_that_of_plain_decoding_under_the_same_adapters(pairs, prompts, tmp_path):
    flags = ["--lora-backend", "torch_native", "--max-loras-per-batch", "3", "--lora-paths"]
    flags += [f"{name}={save_adapter(tmp_path / name, seed)}" for seed, name in enumerate(("one", "two"))]
    mixtures = ((None, "one", "two"), (None,), ("two",))
    with Server(*base(pairs.target), *flags, env=UNPINNED) as server:
        wanted = {mixture: answers(server, prompts, mixture) for mixture in mixtures}
    assert len({str(found) for found in wanted.values()}) == len(mixtures)
    with switched(tmp_path, pairs.target, pairs.eagle3, *flags, env=UNPINNED) as switch:
        for policy in ("depths", "random", "rests", "own"):
            server = switch.to(policy)
            for mixture in mixtures:
                assert answers(server, prompts, mixture) == wanted[mixture], (policy, mixture)
        info = server.info()["dspark"]
        assert info["faults"] == {} and info["accepted"] > 100 and len(info["depths"]) > 4
