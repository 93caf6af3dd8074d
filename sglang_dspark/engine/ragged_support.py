"""What of SGLang 0.5.23 cannot verify rows of different length, under EAGLE and under native drafts."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.hybrid_arch import hybrid_kda_config, mambaish_config
from sglang.srt.runtime_context import get_platform


def runs_xqa(backend: str) -> bool:
    """Whether the backend runs XQA, which raises on rows of different length: trtllm_mha does on sm90 and sm120."""
    return backend == "trtllm_mha" and (get_platform().is_sm90 or get_platform().is_sm120)


def reads_uniform_rows(model: Any) -> bool:
    """Whether a target's linear-attention layers take every row for as long as the verify input is wide.

    All of SGLang's do (GDN, Mamba2, short convolutions, Lightning) but KDA, which alone reads the rows' own lengths.
    """
    return mambaish_config(model) is not None and hybrid_kda_config(model) is None
