"""Server arguments of a native DSpark draft: who schedules it, and SGLang's device gate on a CPU.

SGLang's ragged verify is off by default (SGLANG_RAGGED_VERIFY_MODE=static); here it is on wherever it is known to work,
unless the user has set the variable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors import safe_open
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view, resolving_view
from sglang.srt.environ import envs
from sglang.srt.runtime_context import attn_dp_enabled_of

from sglang_dspark.confidence import NATIVE
from sglang_dspark.config import MAX_STEPS, Refusal, read_options
from sglang_dspark.engine.calibration import temperatures
from sglang_dspark.engine.deployment import cost_key
from sglang_dspark.engine.ragged_support import reads_uniform_rows, runs_xqa
from sglang_dspark.engine.step_cost import check_files

logger = logging.getLogger(__name__)

MODE = envs.SGLANG_RAGGED_VERIFY_MODE
# Backends whose target verify takes rows of different length, in eager mode and in graphs (read from SGLang 0.5.23).
# flashinfer raises in graphs, and triton would read uniform rows.
COMPACT_BACKENDS = ("fa3", "fa4", "trtllm_mha", "trtllm_mla", "flashinfer_mla", "dsv4", "intel_amx")

_set_here = False  # whether MODE was set by this module, in this process


def forget_mode() -> None:
    """Before arguments are resolved: take back what an earlier server of this process was given."""
    global _set_here
    if _set_here:
        os.environ.pop(MODE.name, None)
    _set_here = False


def handle_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """SGLang's _handle_dspark, with the verify mode chosen before and our files checked after it.

    Raises:
        Refusal: a confidence head beside the draft's own; a step cost or calibration that is damaged or was made for
            something else.
    """
    choose_mode(server_args)
    if resolving_view(server_args).device == "cpu":
        with mock.patch.object(speculative_hook, "resolving_view", lambda args: _SaysCuda(resolving_view(args))):
            original(server_args)
    else:
        original(server_args)
    why = why_sglangs_own(server_args)
    if why is not None:
        logger.info("DSPARK: SGLang schedules this native draft itself, because %s.", why)
        return
    cfg, options = resolved_view(server_args), read_options()
    if options.head is not None:
        raise Refusal(
            f"DSPARK_CONFIDENCE_HEAD={options.head} is for EAGLE drafts, and {cfg.speculative_draft_model_path} has a "
            "head of its own; leave it out."
        )
    check_files(options, cfg.speculative_dspark_sps_table_path, cost_key(cfg, model_config_of(server_args)))
    temperatures(cfg.speculative_dspark_confidence_sts_path, NATIVE, cfg.speculative_num_draft_tokens - 1)


def choose_mode(server_args: Any) -> None:
    """Compact verify where the user has not chosen and nothing speaks against it; every process inherits the choice."""
    global _set_here
    if MODE.is_set():
        return
    why = why_static(server_args) or why_not_scheduled(server_args)
    if why is not None:
        logger.info("DSPARK: SGLANG_RAGGED_VERIFY_MODE stays static, because %s.", why)
        return
    MODE.set("compact")
    _set_here = True


def why_sglangs_own(server_args: Any) -> str | None:
    """Why SGLang's own worker serves the draft; None where ours does. The same in every process of a server."""
    if MODE.get() != "compact":
        return f"SGLANG_RAGGED_VERIFY_MODE is {MODE.get()}"
    return why_not_scheduled(server_args)


def why_not_scheduled(server_args: Any) -> str | None:
    """What our scheduling of native drafts was not made for."""
    cfg = resolving_view(server_args)
    width = cfg.speculative_num_draft_tokens
    return _first(
        (attn_dp_enabled_of(cfg), "attention data parallelism gathers budgets over ranks"),
        (cfg.pp_size != 1, f"--pipeline-parallel-size is {cfg.pp_size}"),
        (cfg.disaggregation_mode != "null", f"--disaggregation-mode is {cfg.disaggregation_mode}"),
        (not str(cfg.device).startswith(("cuda", "cpu")), f"--device is {cfg.device}"),
        (width is not None and width - 1 > MAX_STEPS, f"a block of {width} is longer than {MAX_STEPS} drafts"),
        (cfg.enable_deterministic_inference, "--enable-deterministic-inference wants the same rows in every run"),
        (envs.SGLANG_SIMULATE_ACC_LEN.get() > 0, "SGLANG_SIMULATE_ACC_LEN simulates the acceptance"),
    )


def why_static(server_args: Any) -> str | None:
    """What SGLang 0.5.23 refuses, or does wrong, with rows of different length."""
    cfg, model = resolving_view(server_args), model_config_of(server_args)
    prefill, decode = attention_backends_of(resolved_view(server_args))
    backend = prefill if cfg.speculative_attention_mode == "prefill" else decode
    return _first(
        (cfg.enable_lora or cfg.lora_paths, "LoRA segments have one width"),
        (cfg.enable_two_batch_overlap, "--enable-two-batch-overlap cannot split them"),
        (cfg.disable_cuda_graph_padding, "--disable-cuda-graph-padding leaves no tiers to pad to"),
        (cfg.enable_linear_replayssm_spec, "--enable-linear-replayssm-spec folds uniform rows"),
        (cfg.quantization == "minimax_m3_nvfp4", "M3.1 NVFP4 asks for it"),
        (cfg.dcp_size != 1 or cfg.attn_cp_size != 1, "context parallelism splits uniform rows"),
        (envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get(), "SGLANG_OPT_USE_ONLINE_COMPRESS asks for it"),
        (envs.SGLANG_DSPARK_STS_COLLECT_PATH.get(), "SGLANG_DSPARK_STS_COLLECT_PATH collects from full rows"),
        (not _has_confidence_head(cfg), "the draft has no confidence head"),
        (backend not in COMPACT_BACKENDS, f"--attention-backend {backend} cannot verify rows of different length"),
        (runs_xqa(backend), "XQA, which is --attention-backend trtllm_mha on this GPU, wants rows of one length"),
        (reads_uniform_rows(model), "the target's linear attention reads rows of one length"),
        (model.model_is_mrope, "positions of three parts are made for rows of one length"),
    )


def _first(*reasons: tuple[Any, str]) -> str | None:
    return next((why for holds, why in reasons if holds), None)


def _has_confidence_head(cfg: Any) -> bool:
    """Whether the draft's config and, where it is a folder, its weights have one; SGLang looks at the weights when it
    loads them, and then it is too late for another verify mode."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = cfg.speculative_draft_model_path
    revision = cfg.speculative_draft_model_revision if path else cfg.revision
    bundled = speculative_hook._target_checkpoint_dspark_subfolder(cfg.model_path, cfg.revision, cfg.download_dir)
    path = path or bundled or cfg.model_path
    config = get_config(path, trust_remote_code=cfg.trust_remote_code, revision=revision)
    names = _weight_names(Path(path)) or ["confidence"]
    return bool(getattr(config, "enable_confidence_head", True)) and any("confidence" in name for name in names)


def _weight_names(folder: Path) -> list[str]:
    """Names of the weights in a folder's safetensors files; none where it has no such files."""
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names += weights.keys()
    return names


class _SaysCuda:
    """Resolving arguments whose device passes SGLang's gate, which knows no CPU."""

    device = "cuda"

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)
