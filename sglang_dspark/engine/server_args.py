"""What --speculative-algorithm DSPARK means: looks at the draft, refuses what cannot work, leaves the rest to SGLang.

For an EAGLE-family draft the algorithm resolves to SGLang's EAGLE or EAGLE3, so that every check for those names in
SGLang (KV cache, LoRA, grammar, metrics) holds as it is; the user's DSPARK stays in the raw input, which is how
:func:`is_ours` tells our servers from others, in every process.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
)
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import attn_dp_enabled_of
from sglang.srt.utils.common import get_device

from sglang_dspark.confidence import HEAD, HEADLESS
from sglang_dspark.config import DEFAULT_STEPS, MAX_STEPS, Refusal, read_options
from sglang_dspark.engine.calibration import temperatures
from sglang_dspark.engine.confidence_head import check_head, find_head
from sglang_dspark.engine.deployment import cost_key
from sglang_dspark.engine.draft_kind import FLAG, DraftKind, check_fit, classify
from sglang_dspark.engine.native.arguments import forget_mode
from sglang_dspark.engine.ragged_support import reads_uniform_rows, runs_xqa
from sglang_dspark.engine.step_cost import check_files

logger = logging.getLogger(__name__)

SOURCE = "sglang_dspark"
# Backends whose target verify takes rows of different length (read from SGLang 0.5.23; see RaggedVerifyLayout's users).
RAGGED_BACKENDS = ("fa3", "fa4", "trtllm_mha", "trtllm_mla", "flashinfer_mla", "intel_amx")
# LoRA backends that take every verify for one as wide as the graphs, even where it runs without one (SGLang 0.5.23).
CAPTURED_WIDTH_LORA = ("triton", "triton_v2")


def asks_for_dspark(server_args: Any) -> bool:
    """Whether the user wrote ``--speculative-algorithm DSPARK``."""
    raw = getattr(server_args, "_raw_input", None) or {}
    asked = raw.get("speculative_algorithm", getattr(server_args, "speculative_algorithm", None))
    return isinstance(asked, str) and asked.upper() == "DSPARK"


def is_ours(server_args: Any) -> bool:
    """Whether this server runs our worker: DSPARK was asked for, and the draft is of the EAGLE family."""
    return asks_for_dspark(server_args) and resolved_view(server_args).speculative_algorithm in ("EAGLE", "EAGLE3")


def keeps_overlap(server_args: Any) -> bool:
    """Whether a server of ours on CPU runs SGLang's overlap schedule, which SGLang turns off there."""
    return is_ours(server_args) and read_options().cpu_overlap


def resolve(server_args: Any) -> None:
    """Before SGLang resolves anything: pick the algorithm from the draft and refuse what cannot work.

    Raises:
        Refusal: one sentence with flag, value and remedy.
    """
    forget_mode()
    if not asks_for_dspark(server_args):
        return
    cfg = resolving_view(server_args)
    device = _device(cfg)
    kind, path = _draft(cfg)
    read_options()  # a wrong option is refused here, before weights load
    if kind is DraftKind.DSPARK:
        if device == "cpu":
            declare_resolution(server_args, SOURCE, **_cpu_backends(cfg))
        return  # the rest is SGLang's own, and native.arguments.handle_dspark around it
    _refuse_unsupported(cfg)
    if device not in ("cpu", "cuda"):
        raise Refusal(f"--device {device} is not supported with DSPARK; use cuda or cpu.")
    steps = _steps(cfg)
    chosen = {
        "speculative_algorithm": "EAGLE3" if kind is DraftKind.EAGLE3 else "EAGLE",
        "speculative_draft_model_path": path,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }
    if device == "cpu":
        chosen.update(_cpu_backends(cfg))
    declare_resolution(server_args, SOURCE, **chosen)
    logger.info("DSPARK: %s draft %s, at most %d draft tokens a step.", kind.value, path, steps)


def check_resolved(server_args: Any) -> None:
    """Once SGLang has read the model's config and resolved the attention backend: what can be refused only then.

    Raises:
        Refusal: a mode that SGLang runs the target in and that DSPARK cannot; a target or a backend that cannot verify
            rows of different length; a step cost, confidence head or calibration that is damaged or was made for
            something else.
    """
    if not is_ours(server_args):
        return
    check_modes(server_args)
    check_target(server_args)
    check_backend(server_args)
    check_lora_backend(server_args)
    cfg, options, model = resolved_view(server_args), read_options(), model_config_of(server_args)
    check_files(options, cfg.speculative_dspark_sps_table_path, cost_key(cfg, model))
    head = find_head(options, cfg.speculative_draft_model_path, cfg.tp_size)
    check_head(head, model.hidden_size)
    source = HEADLESS if head is None else HEAD
    temperatures(cfg.speculative_dspark_confidence_sts_path, source, cfg.speculative_num_steps)


def check_modes(server_args: Any) -> None:
    """Refuse what SGLang may have turned on by itself: for a target, or under a flag's other name."""
    cfg = resolved_view(server_args)
    if attn_dp_enabled_of(cfg):
        raise Refusal(
            f"--attn-dp-size {cfg.attn_dp_size} (once --enable-dp-attention) lets ranks idle while others draft, and "
            "DSPARK's depth differs by step; leave it out."
        )
    if cfg.enable_multi_layer_eagle:
        raise Refusal(
            f"--enable-multi-layer-eagle, which SGLang turns on by itself for some targets such as --model-path "
            f"{cfg.model_path}, is not supported with DSPARK; use --speculative-algorithm EAGLE."
        )
    if cfg.enable_deterministic_inference:
        raise Refusal(
            "--enable-deterministic-inference promises a seed the same output in every run, and what DSPARK verifies "
            f"follows measured times; leave it out, or use --speculative-algorithm {cfg.speculative_algorithm}."
        )


def check_target(server_args: Any) -> None:
    """Refuse a target whose linear-attention layers cannot verify rows of different length, or not under LoRA."""
    cfg, model = resolved_view(server_args), model_config_of(server_args)
    if reads_uniform_rows(model):
        raise Refusal(
            f"--model-path {cfg.model_path} has linear-attention layers that cannot verify rows of different length, "
            f"which DSPARK needs; use --speculative-algorithm {cfg.speculative_algorithm}."
        )
    if mambaish_config(model) is not None and _has_adapters(cfg):
        # They find a request's states by the width of the widest row, where LoRA takes it for that of every row.
        raise Refusal(
            f"--enable-lora asks for narrower rows than the linear-attention layers of --model-path {cfg.model_path} "
            "can verify under DSPARK; leave LoRA out."
        )


def check_backend(server_args: Any) -> None:
    """Refuse an attention backend that cannot verify rows of different length, or not under LoRA adapters."""
    cfg = resolved_view(server_args)
    prefill, decode = attention_backends_of(cfg)
    used = prefill if cfg.speculative_attention_mode == "prefill" else decode
    if runs_xqa(used):
        raise Refusal(
            f"--attention-backend {used} is XQA on this GPU, which cannot verify rows of different length, as DSPARK "
            "needs; use fa4, or fa3 on sm90."
        )
    if used == "trtllm_mla" and _has_adapters(cfg):
        # It wants windows of the widest row, where LoRA takes the window for the width of every row.
        raise Refusal(
            "--attention-backend trtllm_mla cannot verify LoRA batches in rows of changing length, as DSPARK does; "
            "use flashinfer_mla, or leave --enable-lora out."
        )
    for backend in {used, prefill} if cfg.device == "cpu" else {used}:
        if backend not in RAGGED_BACKENDS:
            raise Refusal(
                f"--attention-backend {backend} cannot verify rows of different length, which DSPARK needs; "
                f"use one of {', '.join(RAGGED_BACKENDS)}."
            )


def check_lora_backend(server_args: Any) -> None:
    """Refuse a LoRA backend that dies of a verify narrower than the graphs, which a shallow step under adapters is."""
    cfg = resolved_view(server_args)
    graphs = cfg.cuda_graph_config.decode.backend != Backend.DISABLED
    if graphs and _has_adapters(cfg) and cfg.lora_backend in CAPTURED_WIDTH_LORA:
        raise Refusal(
            f"--lora-backend {cfg.lora_backend} wants every verify as wide as the CUDA graphs, and DSPARK's depth "
            "changes; use csgmv, or give --cuda-graph-backend-decode disabled."
        )


def _has_adapters(cfg: Any) -> bool:
    """Whether LoRA will be on: after these checks SGLang takes paths alone for the flag."""
    return bool(cfg.enable_lora or cfg.lora_paths)


def _device(cfg: Any) -> str:
    """The device as SGLang resolves it later: this machine's where none is given, and without a number."""
    return str(cfg.device or get_device()).split(":")[0]


def _draft(cfg: Any) -> tuple[DraftKind, str]:
    target = _read_config(cfg, cfg.model_path, cfg.revision, "--model-path")
    path = cfg.speculative_draft_model_path
    if path is None:
        path, draft, is_target = cfg.model_path, target, True
        if _bundles_dspark(cfg):
            return DraftKind.DSPARK, path
    else:
        draft = _read_config(cfg, path, cfg.speculative_draft_model_revision, FLAG)
        is_target = path == cfg.model_path
    kind = classify(draft, path, is_target=is_target)
    check_fit(kind, draft, target, path)
    return kind, path


def _bundles_dspark(cfg: Any) -> bool:
    from sglang.srt.arg_groups.speculative_hook import _target_checkpoint_dspark_subfolder

    return _target_checkpoint_dspark_subfolder(cfg.model_path, cfg.revision, cfg.download_dir) is not None


def _read_config(cfg: Any, path: str, revision: str | None, flag: str) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    overrides = json.loads(cfg.json_model_override_args) if flag == "--model-path" else {}
    try:
        return get_config(
            path, trust_remote_code=cfg.trust_remote_code, revision=revision, model_override_args=overrides
        )
    except Exception as error:  # every way in which a folder or a hub name can be no checkpoint
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refusal(f"{flag} {path} cannot be read as a model checkpoint ({reason}); check the name.") from None


def _steps(cfg: Any) -> int:
    steps, tokens = cfg.speculative_num_steps, cfg.speculative_num_draft_tokens
    if steps is None:
        steps = DEFAULT_STEPS if tokens is None else tokens - 1
    if not 1 <= steps <= MAX_STEPS:
        raise Refusal(
            f"--speculative-num-steps {steps} must be from 1 to {MAX_STEPS} with DSPARK: "
            "it is the most that is drafted in a step, and the scheduler picks less by itself."
        )
    if tokens is not None and tokens != steps + 1:
        raise Refusal(
            f"--speculative-num-draft-tokens {tokens} does not fit --speculative-num-steps {steps}; "
            f"leave it out or give {steps + 1}."
        )
    return steps


def _refuse_unsupported(cfg: Any) -> None:
    if cfg.speculative_eagle_topk not in (None, 1):
        raise Refusal(
            f"--speculative-eagle-topk {cfg.speculative_eagle_topk} drafts a tree, and DSPARK schedules chains; "
            "leave it out or give 1."
        )
    if cfg.pp_size != 1:
        raise Refusal(f"--pipeline-parallel-size {cfg.pp_size} is not supported with DSPARK; give 1 and use --tp-size.")
    if cfg.disaggregation_mode != "null":
        raise Refusal(
            f"--disaggregation-mode {cfg.disaggregation_mode} does not carry the confidence to the decode server; "
            "leave it out with DSPARK."
        )
    if cfg.speculative_adaptive:
        raise Refusal("--speculative-adaptive moves the depth by itself, as DSPARK does; leave it out.")
    if cfg.enable_two_batch_overlap:
        raise Refusal("--enable-two-batch-overlap cannot split ragged verify rows; leave it out with DSPARK.")
    for flag, size in (("attn-cp-size", cfg.attn_cp_size), ("dcp-size", cfg.dcp_size)):
        if size != 1:
            raise Refusal(f"--{flag} {size} splits rows of one length, and DSPARK's are not; leave it out.")
    for flag, value in (
        ("single", cfg.speculative_accept_threshold_single),
        ("acc", cfg.speculative_accept_threshold_acc),
    ):
        if value != 1.0:
            raise Refusal(
                f"--speculative-accept-threshold-{flag} {value} changes the output distribution, which DSPARK never "
                "does; leave it out."
            )


def _cpu_backends(cfg: Any) -> dict[str, str]:
    """On a CPU without AMX, SGLang turns the base backend into torch_native, which EAGLE cannot verify on; the split
    pair it leaves alone."""
    if cfg.attention_backend not in (None, "intel_amx"):
        return {}  # the user's own choice: check_backend says no to it where it must
    return {
        "prefill_attention_backend": cfg.prefill_attention_backend or "intel_amx",
        "decode_attention_backend": cfg.decode_attention_backend or "intel_amx",
    }
