"""What cannot work is refused before weights load, in one sentence that names flag, value and remedy."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from benchmarks.launch import CPU_FLAGS, free_port
from tests.engine.conftest import dspark, refusal

REFUSED = {
    "tree": (["--speculative-eagle-topk", "4"], "--speculative-eagle-topk 4"),
    "no steps": (["--speculative-num-steps", "0"], "--speculative-num-steps 0"),
    "too many steps": (["--speculative-num-steps", "17"], "--speculative-num-steps 17"),
    "tokens and steps": (
        ["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "7"], "--speculative-num-draft-tokens 7"
    ),
    "pipeline parallel": (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2"),
    "adaptive": (["--speculative-adaptive"], "--speculative-adaptive"),
    "loose acceptance": (["--speculative-accept-threshold-single", "0.5"], "--speculative-accept-threshold-single 0.5"),
    "backend": (
        ["--prefill-attention-backend", "torch_native", "--decode-attention-backend", "torch_native"],
        "--attention-backend torch_native",
    ),
    "LoRA backend": (
        ["--lora-backend", "triton", "--lora-paths", "name=path", "--cuda-graph-backend-decode", "full"],
        "--lora-backend triton",
    ),
    "context parallel": (["--attn-cp-size", "2", "--tp-size", "2"], "--attn-cp-size 2"),
    "decode context parallel": (["--dcp-size", "2", "--tp-size", "2"], "--dcp-size 2"),
    "two-batch overlap": (["--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
    "data-parallel attention": (["--attn-dp-size", "2", "--tp-size", "2"], "--attn-dp-size 2"),
    "data-parallel attention by its old name": (
        ["--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"], "--attn-dp-size 2"
    ),
    "multi-layer EAGLE": (["--enable-multi-layer-eagle"], "--enable-multi-layer-eagle"),
    "another device": (["--device", "xpu:0"], "--device xpu"),
    "disaggregation": (["--disaggregation-mode", "decode"], "--disaggregation-mode decode"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_option_that_cannot_work_is_refused(resolve, case):
    args, names = REFUSED[case]
    assert names in refusal(lambda: resolve(*args))


@pytest.mark.parametrize(
    "field, flag",
    [
        (None, ""),
        ("enable_multi_layer_eagle", "by itself for some targets such as --model-path its/name"),
        ("enable_deterministic_inference", "--enable-deterministic-inference"),  # --rl-on-policy-target does
    ],
)
def test_what_sglang_turns_on_by_itself_is_refused_like_the_flag(ours, field, flag):
    cfg = {"attn_dp_size": 1, "ep_join_mode": None, "enable_multi_layer_eagle": False, "model_path": "its/name"}
    cfg |= {"enable_deterministic_inference": False, "speculative_algorithm": "EAGLE"} | (
        {field: True} if field else {}
    )
    answer(ours.check_modes, SimpleNamespace(**cfg), flag, works=field is None)


@pytest.mark.parametrize("given, device", [("cuda:1", "cuda"), ("cpu", "cpu"), (None, "cpu")])
def test_the_device_is_the_one_that_sglang_will_take(ours, given, device):
    assert ours._device(SimpleNamespace(device=given)) == device


NO_LORA = {"enable_lora": None, "lora_paths": None}
LORA = ({"enable_lora": True, "lora_paths": None}, {"enable_lora": None, "lora_paths": ["name=path"]})


@pytest.fixture
def ours(monkeypatch):
    """The checks of resolved arguments, over fakes that are resolved."""
    from sglang_dspark.engine import server_args

    monkeypatch.setattr(server_args, "resolved_view", lambda args: args)
    return server_args


def answer(check, cfg, flag, works):
    """Holds a check to its answer: nothing, or a sentence with the flag and its value."""
    if works:
        check(cfg)
    else:
        assert flag in refusal(lambda: check(cfg))


@pytest.mark.parametrize(
    "backend, lora, works",
    [
        ("trtllm_mla", LORA[0], False),
        ("trtllm_mla", LORA[1], False),
        ("trtllm_mla", NO_LORA, True),
        ("fa3", LORA[0], True),
    ],
)
def test_a_backend_that_wants_windows_of_the_widest_row_is_refused_under_adapters(
    ours, monkeypatch, backend, lora, works
):
    cfg = SimpleNamespace(speculative_attention_mode="decode", device="cuda", **lora)
    monkeypatch.setattr(ours, "attention_backends_of", lambda args: ("fa3", backend))
    answer(ours.check_backend, cfg, f"--attention-backend {backend}", works)


@pytest.mark.parametrize(
    "backend, gpu, works",
    [
        ("trtllm_mha", "sm90", False),
        ("trtllm_mha", "sm120", False),
        ("trtllm_mha", "sm100", True),
        ("fa3", "sm90", True),
    ],
)
def test_trtllm_mha_is_refused_on_a_gpu_where_it_takes_rows_of_one_length(ours, monkeypatch, backend, gpu, works):
    from sglang.srt.runtime_context import override_platform

    cfg = SimpleNamespace(speculative_attention_mode="decode", device="cuda", **NO_LORA)
    monkeypatch.setattr(ours, "attention_backends_of", lambda args: ("fa3", backend))
    with override_platform(is_sm90=gpu == "sm90", is_sm120=gpu == "sm120"):
        answer(ours.check_backend, cfg, f"--attention-backend {backend}", works)


@pytest.mark.parametrize(
    "backend, lora, graphs, works",
    [
        ("triton", LORA[0], "full", False),
        ("triton_v2", LORA[1], "breakable", False),
        ("csgmv", LORA[0], "full", True),
        ("triton", LORA[0], "disabled", True),
        ("triton", NO_LORA, "full", True),
    ],
)
def test_a_lora_backend_that_wants_the_width_of_the_graphs_is_refused_with_them(ours, backend, lora, graphs, works):
    decode = SimpleNamespace(backend=graphs)
    cfg = SimpleNamespace(lora_backend=backend, cuda_graph_config=SimpleNamespace(decode=decode), **lora)
    answer(ours.check_lora_backend, cfg, f"--lora-backend {backend}", works)


def linear_attention(name):
    """SGLang's config of a target by that class, as its own checks are asked about it; "" for one without."""
    from sglang.srt import configs
    from transformers import LlamaConfig

    config = getattr(configs, name)() if name else LlamaConfig()
    return SimpleNamespace(hf_config=config, is_draft_model=False, linear_attn_registry_result=None)


@pytest.mark.parametrize(
    "target, lora, flag",
    [
        ("Qwen3NextConfig", NO_LORA, "--model-path its/name"),
        ("FalconH1Config", NO_LORA, "--model-path its/name"),
        ("Lfm2Config", NO_LORA, "--model-path its/name"),
        ("KimiLinearConfig", NO_LORA, None),
        ("KimiLinearConfig", LORA[0], "--enable-lora"),
        ("", LORA[0], None),
    ],
)
def test_a_target_whose_linear_attention_reads_uniform_rows_is_refused(ours, monkeypatch, target, lora, flag):
    cfg = SimpleNamespace(model_path="its/name", speculative_algorithm="EAGLE", **lora)
    monkeypatch.setattr(ours, "model_config_of", lambda args: linear_attention(target))
    answer(ours.check_target, cfg, flag, works=flag is None)


@pytest.fixture
def hybrid(pairs, tmp_path):
    """The tiny target's folder, whose config says that it is a Qwen3-Next: linear attention and a draft of its own."""
    folder = shutil.copytree(pairs.target, tmp_path / "hybrid")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("draft", ("eagle3", None))
def test_a_hybrid_target_is_refused_for_what_it_is_whichever_draft_it_has(resolve, pairs, hybrid, draft):
    given = draft and getattr(pairs, draft)
    sentence = refusal(lambda: resolve("--disable-radix-cache", draft=given, target=hybrid))
    assert f"--model-path {hybrid} has linear-attention layers" in sentence
    assert f"use --speculative-algorithm {'EAGLE3' if draft else 'EAGLE'}." in sentence


@pytest.mark.parametrize("misfit", ("misfit_vocab", "misfit_hidden"))
def test_a_draft_for_another_target_is_refused(resolve, pairs, misfit):
    draft = getattr(pairs, misfit)
    sentence = refusal(lambda: resolve(draft=draft))
    assert str(draft) in sentence and "trained for this target" in sentence


def test_a_missing_draft_is_refused(resolve, tmp_path):
    assert "--speculative-draft-model-path is missing" in refusal(lambda: resolve(draft=None))
    assert f"{tmp_path} cannot be read" in refusal(lambda: resolve(draft=tmp_path))


def test_a_target_that_is_no_draft_is_refused(resolve, pairs, tmp_path):
    other = tmp_path / "other"
    other.symlink_to(pairs.target)
    assert "not an EAGLE, EAGLE3, NEXTN or DSpark draft" in refusal(lambda: resolve(draft=other))


@pytest.mark.parametrize("asked", (False, True))
def test_a_cpu_server_overlaps_steps_only_where_it_is_asked_to(resolve, monkeypatch, asked):
    from sglang.srt.arg_groups.overrides import resolved_view

    if asked:
        monkeypatch.setenv("DSPARK_CPU_OVERLAP", "1")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolved_view(resolve()).disable_overlap_schedule is not asked


@pytest.mark.parametrize("draft, algorithm", [("eagle3", "EAGLE3"), ("eagle3_full", "EAGLE3"), ("eagle", "EAGLE")])
def test_each_draft_gets_its_own_algorithm(resolve, pairs, draft, algorithm):
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_dspark.engine.server_args import is_ours

    server_args = resolve(draft=getattr(pairs, draft))
    view = resolved_view(server_args)
    assert view.speculative_algorithm == algorithm and is_ours(server_args)
    assert (view.speculative_num_steps, view.speculative_num_draft_tokens, view.speculative_eagle_topk) == (5, 6, 1)


def test_the_draft_inside_a_target_needs_no_path(resolve, pairs):
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(resolve("--speculative-num-steps", "2", draft=None, target=pairs.nextn))
    assert (view.speculative_algorithm, view.speculative_draft_model_path) == ("EAGLE", str(pairs.nextn))
    assert view.speculative_num_steps == 2


def test_a_refusal_on_the_command_line_is_one_sentence_and_no_traceback(pairs):
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(pairs.target), *CPU_FLAGS),
        *("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(pairs.misfit_vocab)),
    ]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "use a draft trained for this target." in done.stderr


@pytest.mark.long
def test_a_tensor_parallel_rank_with_another_setting_is_refused_at_start(pairs, monkeypatch):
    """Two nodes of one rank each, as only there the environments can differ."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    address = f"127.0.0.1:{free_port()}"
    nodes = [
        dspark(
            pairs.target, pairs.eagle3, "--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank),
            "--dist-init-addr", address, env={"DSPARK_PROFILE_SECONDS": str(1 + rank)},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    sentence = (
        "Tensor-parallel rank 1 was started with profile_seconds 2.0 and rank 0 with 1.0; start all ranks with the "
        "same flags, DSPARK_* variables and files."
    )
    try:
        for node in nodes:
            with suppress(subprocess.TimeoutExpired):  # a node may keep its process when its rank is gone
                node.process.wait(600 if node is nodes[0] else 30)
            assert sentence in node.tail(100_000), node.tail()
    finally:
        for node in nodes:
            node.close()


def test_another_sglang_version_refuses_dspark_and_nothing_else(monkeypatch):
    from types import SimpleNamespace

    from sglang_dspark import plugin

    monkeypatch.setattr(plugin, "version", lambda _: "0.6.0")
    assert "needs SGLang 0.5.23 and 0.6.0 is installed" in refusal(
        lambda: plugin.refuse_version(SimpleNamespace(speculative_algorithm="dspark"))
    )
    plugin.refuse_version(SimpleNamespace(speculative_algorithm="EAGLE3"))
    plugin.refuse_version(SimpleNamespace(speculative_algorithm=None))
