"""What SGLang's builtin DSPARK lacks on the CPU engine. Nothing here acts on tensors of another device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
