"""CUDA graphs for verifies of every size and drafts of every depth, all of them SGLang's own.

Verify: SGLang captures the target by token count ("tiers") with ragged rows, for its builtin DSPARK alone. An EAGLE
verify needs no other graph: what is missing is that the runner is told to, that the verify input it captures with
carries ragged rows, and that a step's tokens are padded to the tier above them.

Draft: SGLang's adaptive mode makes attention backends and graphs for each of its step counts; here every depth has its
own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_exec, get_lora
from sglang.srt.speculative.dspark_components.dspark_planner import (
    ragged_capture_num_tokens,
    ragged_layout_exceeds_captured_grid,
)
from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, round_up_grid
from sglang.srt.utils import get_available_gpu_memory

from sglang_dspark.engine.verify import target_input

logger = logging.getLogger(__name__)

LEAST_FREE = 1.0  # gigabytes that capturing leaves alone: what SGLang's own steps take beyond their graphs


def captures_tiers(original: Callable[[Any], bool], spec_algorithm: Any) -> bool:
    """Whether the target's decode graphs are captured by token count; SGLang's answer, or else ours for EAGLE drafts.

    Not where SGLang refuses to, nor where a user sets SGLANG_RAGGED_VERIFY_MODE to anything but compact: full rows then
    replay graphs of full rows, and ragged ones run the target eagerly.
    """
    if original(spec_algorithm):
        return True
    asked, lora = envs.SGLANG_RAGGED_VERIFY_MODE, get_lora()
    refused = (
        get_exec().graph.disable_cuda_graph_padding
        or lora.enable_lora
        or lora.lora_paths
        or (asked.is_set() and asked.get() != RaggedVerifyMode.COMPACT.value)
    )
    return bool(spec_algorithm.is_eagle()) and not refused


def capture_input(spec_info: Any, runner: Any, num_tokens: int) -> Any:
    """The verify input that a graph of ``num_tokens`` is captured with, where SGLang would take an EAGLE one.

    Its rows are those that SGLang captures the tier with; their tensors are baked into the graph and refilled at each
    replay. None: SGLang's own.
    """
    if not runner.ragged_verify_mode or spec_info is None:
        return None
    layout = runner._capture_ragged_verify_layout(num_tokens)
    return target_input(None, None, layout, runner.captured_req_width)


def tiers_of(model_runner: Any) -> tuple[int, ...] | None:
    """Token counts that the target's graphs were captured for, ascending; None without graphs of ragged rows."""
    tiers = ragged_capture_num_tokens(model_runner=model_runner)
    return None if tiers is None else tuple(tiers)


def tier_of(model_runner: Any, requests: int, tokens: int) -> int | None:
    """The tier that a verify of ``tokens`` of so many requests is padded to; None where it runs eagerly."""
    tiers = ragged_capture_num_tokens(model_runner=model_runner)
    if tiers is None or ragged_layout_exceeds_captured_grid(
        num_reqs=requests, verify_num_draft_tokens=1, model_runner=model_runner, tier_tokens_hint=tokens
    ):
        return None
    return round_up_grid(tokens, tiers)


def prepare_depths(worker: Any) -> None:
    """Make for every depth below gamma what SGLang made for gamma: backends always, graphs while memory lasts.

    What a depth's graphs take is known once one was captured; the next is captured where twice that, and LEAST_FREE,
    are left. A depth without graphs drafts eagerly. Every rank does as the first one.
    """
    draft, gamma = worker.draft_worker, worker.gamma
    draft.keep_depth()
    graphs, taken, eager = _captures(draft), 0.0, []
    if (extend := draft.depths[gamma].extend_graph) is not None:
        # All depths' graphs share this buffer, and are captured with rows of the length it holds: gamma + 1 would read
        # past those of depth 0.
        extend.buffers.extend_seq_lens.fill_(1)
    for depth in (*range(1, gamma), 0):  # those that schedules choose most first; depth 0 has only an extend
        before = _free(draft) if graphs else 0.0
        graphs = graphs and bool(worker.agreement.first_says(before > LEAST_FREE + 2 * taken))
        with draft.contexts(), worker._override_worker_state(depth, depth + 1):
            draft.init_attention_backend()
            draft.cuda_graph_runner = draft.cuda_graph_runner_for_draft_extend = None
            if graphs:
                draft._capture_cuda_graphs()
                taken = max(taken, before - _free(draft))
            draft.keep_depth()
        eager += [] if graphs else [depth]
    draft.set_depth(gamma)
    if _captures(draft) and eager:
        logger.warning(
            "DSPARK: no memory for draft graphs at depths %s, which draft eagerly; a smaller --mem-fraction-static "
            "leaves more.", sorted(eager),
        )  # fmt: skip


def _captures(draft: Any) -> bool:
    """Whether SGLang captured anything of the draft: it does not on CPU, nor with graphs disabled."""
    return draft.depths[draft.gamma].draft_graph is not None or draft.depths[draft.gamma].extend_graph is not None


def _free(draft: Any) -> float:
    """Gigabytes left on the device."""
    return float(get_available_gpu_memory(draft.device, draft.gpu_id))
