"""What SGLang's builtin DSPARK lacks on the CPU engine. Nothing here acts on tensors of another device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import attention_backends, get_spec
from torch import Tensor

from sglang_dspark.engine.verify import ragged_extend_metadata


def draft_backend(original: Callable[..., str], **kwargs: Any) -> str:
    """The attention backend of the draft: on a CPU the one that prefills, which SGLang's list of choices lacks."""
    chosen = get_spec().speculative_draft_attention_backend or attention_backends()[0]
    return "intel_amx" if chosen == "intel_amx" else original(**kwargs)


def record_stream(original: Callable[..., None], tensor: Tensor, stream: Any) -> None:
    """Tensor.record_stream, which CPU tensors refuse: the host frees nothing that is in use."""
    if not tensor.is_cpu:
        original(tensor, stream)


def extend_metadata(original: Callable[..., Any], backend: Any, forward_batch: Any) -> Any:
    """IntelAMXAttnBackend._build_extend_metadata for the draft's block, a uniform verify, and a ragged verify.

    It asks a verify input for tree_topk, which DFlash's has not; it is a chain, so that is 1.
    """
    spec_info = forward_batch.spec_info
    if spec_info is not None and not hasattr(spec_info, "tree_topk"):
        spec_info.tree_topk = 1
    return ragged_extend_metadata(forward_batch) or original(backend, forward_batch)


def target_probs(
    original: Callable[..., Tensor], *, next_token_logits: Tensor, sampling_info: Any, draft_token_num: int, bs: int,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """build_speculative_verify_target_probs: [R, W, V] float32. On CPU without top-k and top-p, which the chain sampler
    there applies as SGLang's plain CPU sampler does (engine.sampling.filter_cpu)."""
    if not next_token_logits.is_cpu:
        return original(
            next_token_logits=next_token_logits, sampling_info=sampling_info, draft_token_num=draft_token_num, bs=bs,
            **kwargs,
        )  # fmt: skip
    logits = next_token_logits.view(bs, draft_token_num, -1).float()
    return torch.softmax(logits / sampling_info.temperatures.view(-1, 1, 1), dim=-1)
