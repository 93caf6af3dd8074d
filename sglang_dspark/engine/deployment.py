"""What a cost table holds for: the model, the device and the settings of a server that decide a step's time."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.cost import CostKey


def cost_key(settings: Any, model_config: Any) -> CostKey:
    """The key of a server, from its arguments as SGLang resolved them and the target's model config.

    The same before weights load, when a saved table is checked, and in the worker, when it is used or written.
    """
    backend = settings.decode_attention_backend or settings.attention_backend
    size = f"{model_config.num_hidden_layers} layers x {model_config.hidden_size}, {model_config.vocab_size} tokens"
    return CostKey(
        model=f"{settings.model_path} ({size})",
        draft=str(settings.speculative_draft_model_path),
        dtype=f"{model_config.dtype}, {settings.quantization or 'not quantised'}, kv {settings.kv_cache_dtype}",
        device=device_name(str(settings.device)),
        backend=str(backend),
        tp=settings.tp_size,
        dp=settings.dp_size,
        ep=settings.ep_size,
        sglang=version("sglang"),
    )


def device_name(device: str) -> str:
    """The accelerator's name; of a CPU its model and the threads given to it, which change every time measured."""
    if not device.startswith("cpu"):
        return str(torch.get_device_module(device).get_device_name(0))
    bound = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND")
    threads = f"bound to {bound}" if bound else os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())
    return f"{_cpu_model()}, threads {threads}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
