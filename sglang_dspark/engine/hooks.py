"""The one table of hooks into SGLang 0.5.23: where, why, and what breaks if SGLang changes there.

Each hook calls a function of ours that is tested alone, and passes straight through for any other algorithm. STARTUP
hooks stand in every process that loads the plugin; WORKER hooks are installed only where our worker is created,
NATIVE ones where it is that for native DSpark drafts, NATIVE_GAPS wherever SGLang serves such a draft: a server with
another algorithm never sees them. A hook that mends a gap of SGLang itself names the patches (sglang_dspark/patches)
that mend it in the source, and is left out where they are in.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dspark.config import Refusal
from sglang_dspark.patches import State, states_of_installed

logger = logging.getLogger(__name__)


class Hook(NamedTuple):
    target: str
    """Dotted path inside ``sglang.srt``, or a whole one where it begins with ``sglang.`` or ``torch.``."""
    parameters: str
    """The target's parameter names in SGLang 0.5.23; a test compares them with the installed ones. Empty: the hook only
    fills the name where SGLang leaves it None, and is not installed elsewhere; torch's own have no names either."""
    how: HookType
    function: Callable[..., Any]
    reason: str
    breaks: str
    patches: tuple[str, ...] = ()
    """Patches of SGLang's source that do together what the hook does; none for a feature of ours."""


# -- the hooks: three lines each -----------------------------------------------------------------------------------


def _resolve(server_args: Any) -> None:
    from sglang_dspark.engine.server_args import resolve

    resolve(server_args)


def _check_resolved(_: None, server_args: Any) -> None:
    from sglang_dspark.engine.server_args import check_resolved

    check_resolved(server_args)


def _disable_overlap(original: Callable[..., Any], server_args: Any) -> None:
    from sglang_dspark.engine.server_args import keeps_overlap

    if not keeps_overlap(server_args):
        original(server_args)


def _create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    from sglang_dspark.engine.server_args import is_ours

    return _our_worker() if is_ours(server_args) else _native_worker(server_args) or original(algorithm, server_args)


def _our_worker() -> type:
    from sglang_dspark.engine.worker import DSparkWorker

    install(WORKER)
    return DSparkWorker


def _native_worker(server_args: Any) -> type | None:
    from sglang_dspark.engine.server_args import asks_for_dspark

    if not asks_for_dspark(server_args):
        return None
    from sglang_dspark.engine.native.arguments import why_sglangs_own

    install(NATIVE_GAPS)
    if why_sglangs_own(server_args):
        return None
    install(NATIVE)
    from sglang_dspark.engine.native.worker import NativeWorker

    return NativeWorker


def _handle_dspark(original: Callable[..., Any], server_args: Any) -> None:
    from sglang_dspark.engine.native.arguments import handle_dspark

    handle_dspark(original, server_args)


def _prepare_for_verify(original: Callable[..., Any], verify_input: Any, pool: Any, batch: Any, worker: Any) -> Any:
    from sglang_dspark.engine.verify import prepare_ragged

    return prepare_ragged(original, verify_input, pool, batch, worker)


def _extend_metadata(original: Callable[..., Any], backend: Any, forward_batch: Any) -> Any:
    from sglang_dspark.engine.verify import ragged_extend_metadata

    return ragged_extend_metadata(forward_batch) or original(backend, forward_batch)


def _can_run_graph(original: Callable[..., Any], runner: Any, forward_batch: Any) -> bool:
    from sglang_dspark.engine.verify import fits_graphs

    return fits_graphs(runner, forward_batch) and original(runner, forward_batch)


def _captures_tiers(original: Callable[..., bool], spec_algorithm: Any) -> bool:
    from sglang_dspark.engine.graphs import captures_tiers

    return captures_tiers(original, spec_algorithm)


def _capture_input(spec_info: Any, runner: Any, num_tokens: int) -> Any:
    from sglang_dspark.engine.graphs import capture_input

    return capture_input(spec_info, runner, num_tokens)


def _uses_greedy(original: Callable[..., Any], **kwargs: Any) -> bool:
    return original(**{**kwargs, "is_cpu": False})


def _sample_verify(original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_dspark.engine.sampling import sample_verify

    return sample_verify(original, verify_input, batch, *args, **kwargs)


def _process_verify(verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_dspark.engine.sampling import process_verify

    process_verify(verify_input, batch, logits_output)


def _penalise_verify(verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_dspark.engine.penalties import penalise_verify

    penalise_verify(verify_input, batch, logits_output)


def _count_output(_: Callable[..., Any], batch: Any) -> None:
    from sglang_dspark.engine.penalties import count_output

    count_output(batch)


def _finish(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    from sglang_dspark.engine.stops import finish_token_by_token

    finish_token_by_token(original, req, new_accepted_len)


def _sample_argmax_drafts(original: Callable[..., Any] | None, **kwargs: Any) -> None:
    from sglang_dspark.engine.sampling import sample_argmax_drafts

    sample_argmax_drafts(original, **kwargs)


def _sample_sampled_drafts(original: Callable[..., Any], **kwargs: Any) -> None:
    from sglang_dspark.engine.sampling import sample_sampled_drafts

    sample_sampled_drafts(original, **kwargs)


def _draft_sample(original: Callable[..., Any], probs: Any, num_samples: int = 1, **kwargs: Any) -> Any:
    from sglang_dspark.engine.sampling import draft_sample

    return draft_sample(original, probs, num_samples, **kwargs)


def _propose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from sglang_dspark.engine.sampling import propose

    return propose(original, *args, **kwargs)


def _keep_probs(_: None, probs: Any, limits: Any) -> Any:
    return probs


def _outcome(processor: Any, result: Any, batch: Any) -> None:
    from sglang_dspark.engine.worker import DSparkWorker

    DSparkWorker.take_outcome(processor.model_worker, result, batch)


def _server_info(_: None, internal_state: Any, state: dict[str, Any]) -> None:
    from sglang_dspark.engine.scheduled import add_info

    add_info(internal_state.scheduler.draft_worker, state)


def _request_info(_: None, manager: Any, meta_info: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    from sglang_dspark.engine.request_info import describe

    describe(manager.server_args, meta_info)


def _native_draft_backend(original: Callable[..., str], **kwargs: Any) -> str:
    from sglang_dspark.engine.native.cpu import draft_backend

    return draft_backend(original, **kwargs)


def _record_stream(original: Callable[..., None], tensor: Any, stream: Any) -> None:
    from sglang_dspark.engine.native.cpu import record_stream

    record_stream(original, tensor, stream)


def _native_extend_metadata(original: Callable[..., Any], backend: Any, forward_batch: Any) -> Any:
    from sglang_dspark.engine.native.cpu import extend_metadata

    return extend_metadata(original, backend, forward_batch)


def _native_accept(original: Callable[..., Any], **kwargs: Any) -> Any:
    from sglang_dspark.engine.sampling import accept_drafts

    return accept_drafts(original, **kwargs)


def _native_cost_table(table: Any, **kwargs: Any) -> Any:
    from sglang_dspark.engine.native.planner import without_table

    return without_table(table)


def _native_calibration(original: Callable[..., Any], path: str) -> Any:
    from sglang_dspark.engine.native.planner import calibration_for_sglang

    return calibration_for_sglang(original, path)


# Keyword arguments that both chain samplers of SGLang take.
SAMPLER = (
    "predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, "
    "uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single, threshold_acc, "
    "deterministic"
)

# What SGLang's eagle_sample takes.
VERIFY = "verify_input, batch, logits_output, grammar_mask, uno_target_max_top_k, watermark_state, watermark_full_mask"

# The two patches of the verify's sampling: min-p on every device, and everything on CPU.
SAMPLING = ("01-verify-min-p", "02-cpu-verify-sampling")

# The patch of counting and of penalising.
PENALTIES = ("11-penalties-in-verify",)

# Of both of our workers.
INFO = Hook(
    "managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative", "self, state",
    HookType.AFTER, _server_info,
    "show plan and counters in the server's info endpoint",
    "the counters would be missing from /server_info",
)  # fmt: skip
STOPS = Hook(
    "managers.schedule_batch.Req.update_finish_state", "self, new_accepted_len", HookType.AROUND, _finish,
    "of two stop strings in one accepted run SGLang takes the first of the request's list, not the first one said",
    "where a request stops would depend on the schedule",
    ("10-stop-first-said",),
)  # fmt: skip

STARTUP = (
    Hook(
        "arg_groups.pipeline.run_resolution_pipeline", "server_args", HookType.BEFORE, _resolve,
        "turn DSPARK into the algorithm of the draft, and refuse wrong options, before anything reads them",
        "DSPARK would go to the builtin path, which refuses every draft but DSpark's",
    ),
    Hook(
        "arg_groups.speculative_hook._handle_eagle_family", "server_args", HookType.AFTER, _check_resolved,
        "the attention backend and the model's config are known only here",
        "a backend without ragged rows would fail in, or silently spoil, the first step",
    ),
    Hook(
        "arg_groups.speculative_hook._disable_overlap_schedule_for_cpu", "server_args", HookType.AROUND,
        _disable_overlap,
        "SGLang turns the overlap schedule off for speculative decoding on CPU; with DSPARK_CPU_OVERLAP ours runs it",
        "the overlap schedule could not be tested without a GPU",
    ),
    Hook(
        "arg_groups.speculative_hook._handle_dspark", "server_args", HookType.AROUND, _handle_dspark,
        "for native drafts: ragged verify by default, a CPU passes the device gate, our files are checked",
        "native drafts would verify everything, as SGLang's default does, and be refused on a CPU",
    ),
    Hook(
        "speculative.spec_info.SpeculativeAlgorithm.create_worker", "self, server_args", HookType.AROUND,
        _create_worker,
        "run our worker where the user asked for DSPARK",
        "the draft would run on SGLang's plain EAGLE worker: correct, but never scheduled",
    ),
    Hook(
        "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics", "self, meta_info, recv_obj, i",
        HookType.AFTER, _request_info,
        "SGLang's acceptance rate of a request counts the full depth in every step; ours counts what was verified",
        "an answer would not say how many of its drafts the target saw",
    ),
)  # fmt: skip

WORKER = (
    Hook(
        "speculative.eagle_utils.eagle_prepare_for_verify", "verify_input, req_to_token_pool, batch, target_worker",
        HookType.AROUND, _prepare_for_verify,
        "hand the target forward sum(1 + l_r) tokens instead of R x (depth + 1)",
        "the target would be given full rows under a ragged layout: shapes differ and the step fails",
    ),
    Hook(
        "layers.attention.intel_amx_backend.IntelAMXAttnBackend._build_extend_metadata", "self, forward_batch",
        HookType.AROUND, _extend_metadata,
        "the CPU backend derives uniform rows from draft_token_num and knows no ragged layout",
        "CPU verify would read rows at wrong offsets",
        ("04-cpu-ragged-verify",),
    ),
    Hook(
        "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph", "self, forward_batch",
        HookType.AROUND, _can_run_graph,
        "a runner that captured uniform rows does not look at a batch's layout",
        "a ragged batch could replay a graph of another shape",
        ("05-ragged-verify-graph",),
    ),
    Hook(
        "model_executor.runner.decode_cuda_graph_runner.ragged_verify_compact_graphs_enabled", "spec_algorithm",
        HookType.AROUND, _captures_tiers,
        "SGLang captures the target's graphs by token count for its builtin DSPARK only",
        "the target would run eagerly in every step that verifies less than everything",
    ),
    Hook(
        "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info", "self, num_tokens",
        HookType.AFTER, _capture_input,
        "the verify input that SGLang captures an EAGLE draft's target with says uniform rows",
        "graphs of a token count would be captured for uniform rows, and replay ragged ones wrongly",
    ),
    Hook(
        "speculative.eagle_utils._verify_uses_greedy",
        "is_all_greedy, is_cpu, is_hip, is_xpu, use_rejection_sampling", HookType.AROUND, _uses_greedy,
        "SGLang's CPU verify takes the argmax whatever the temperature; ours samples",
        "temperature would be ignored on CPU",
        SAMPLING,
    ),
    Hook(
        "speculative.spec_utils.sample_draft_proposal",
        "next_token_logits, temperatures, top_ks, sampling_seed, positions, draft_step", HookType.AROUND, _propose,
        "SGLang draws drafts only where draft and target share one vocabulary, which hardly an EAGLE3 draft does",
        "a draft's distribution would not fit the target's, and the rule for sampled drafts would be refused",
    ),
    Hook(
        "speculative.spec_utils.fast_sample",
        "probs, num_samples, sampling_seed, positions, draft_step", HookType.AROUND, _draft_sample,
        "the draft's sampler takes its argmax with a device kernel",
        "rejection sampling with sampled drafts would fail on CPU",
        ("03-cpu-draft-sampling",),
    ),
    Hook(
        "speculative.eagle_utils.eagle_sample", VERIFY, HookType.AROUND, _sample_verify,
        "the samplers below need the batch's sampling parameters, which SGLang does not hand them",
        "min-p, and on CPU top-k and top-p, would have no values",
        SAMPLING,
    ),
    Hook(
        "speculative.eagle_utils.eagle_sample", VERIFY, HookType.BEFORE, _process_verify,
        "SGLang's verify knows no custom logit processors",
        "they would have no effect after the first token",
        ("12-verify-logit-processors",),
    ),
    # Of two hooks before a function the later one runs first: processors see penalised logits, as in plain decoding.
    Hook(
        "speculative.eagle_utils.eagle_sample", VERIFY, HookType.BEFORE, _penalise_verify,
        "SGLang penalises a verified run only by what was said before it",
        "output under penalties would depend on the schedule",
        PENALTIES,
    ),
    STOPS,
    Hook(
        "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", "self", HookType.AROUND, _count_output,
        "SGLang counts one token a step for penalties and min_new_tokens, however many a verify accepted",
        "output under penalties would depend on the schedule, and min_new_tokens count steps",
        PENALTIES,
    ),
    Hook(
        "speculative.eagle_utils.tree_speculative_sampling_target_only", SAMPLER, HookType.AROUND,
        _sample_argmax_drafts,
        "SGLang has no sampler for argmax drafts on CPU, and none that knows min-p",
        "sampled requests would fail on CPU; min-p would be ignored on CUDA",
        SAMPLING,
    ),
    Hook(
        "speculative.eagle_utils.chain_speculative_sampling_triton", f"{SAMPLER}, block_verification", HookType.AROUND,
        _sample_sampled_drafts,
        "SGLang's sampler for sampled drafts is a Triton kernel, and knows no min-p",
        "--speculative-use-rejection-sampling would fail on CPU; min-p would be ignored on CUDA",
        SAMPLING,
    ),
    Hook(
        "speculative.eagle_utils.top_k_renorm_prob", "", HookType.AROUND, _keep_probs,
        "SGLang has none on CPU; the sampler there filters top-k, top-p and min-p together",
        "top-k would fail on CPU",
        SAMPLING,
    ),
    Hook(
        "speculative.eagle_utils.top_p_renorm_prob", "", HookType.AROUND, _keep_probs,
        "as for top-k",
        "top-p would fail on CPU",
        SAMPLING,
    ),
    Hook(
        "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "self, result, batch", HookType.BEFORE, _outcome,
        "SGLang tells a worker what was accepted, but not in which step, and under overlap the next one is launched",
        "nothing would be learnt: neither estimates nor counters would move",
    ),
    INFO,
)  # fmt: skip

NATIVE_GAPS = (
    Hook(
        "speculative.draft_worker_common.resolve_draft_worker_attention_backend", "algo_label", HookType.AROUND,
        _native_draft_backend,
        "SGLang's list of backends for block drafts has none for a CPU",
        "the draft would be given flashinfer on a CPU, and not start",
        ("09-dspark-cpu",),
    ),
    Hook(
        "torch.Tensor.record_stream", "", HookType.AROUND, _record_stream,
        "SGLang's DSPARK records a stream on the lengths, which CPU tensors refuse",
        "the first decode step on a CPU would fail",
        ("09-dspark-cpu",),
    ),
    Hook(
        "layers.attention.intel_amx_backend.IntelAMXAttnBackend._build_extend_metadata", "self, forward_batch",
        HookType.AROUND, _native_extend_metadata,
        "the CPU backend asks a block draft for tree_topk, and knows no ragged layout",
        "drafting, and verifying rows of different length, would fail on a CPU",
        ("04-cpu-ragged-verify", "09-dspark-cpu"),
    ),
    Hook(
        "speculative.dspark_components.dspark_verify.accept_draft_tokens",
        "candidates, target_logits, draft_block, sampling_info, draft_input, gamma, verify_num_draft_tokens, "
        "cutoff_layout, fused_argmax, block_verification, rejection_noise", HookType.AROUND, _native_accept,
        "the chain sampler below needs the batch's sampling parameters, which SGLang does not hand it",
        "min-p, and on CPU top-k and top-p, would have no values, or be applied twice",
        SAMPLING,
    ),
    Hook(
        "sglang.kernels.ops.speculative.dspark.dspark_accept.chain_speculative_sampling_triton",
        f"{SAMPLER}, block_verification", HookType.AROUND, _sample_sampled_drafts,
        "SGLang's sampler for sampled drafts is a Triton kernel, and knows no min-p",
        "sampled requests would fail on CPU; min-p would be ignored on CUDA",
        SAMPLING,
    ),
)  # fmt: skip

NATIVE = (
    STOPS,
    Hook(
        "speculative.dspark_components.dspark_planner.build_sps_cost_table", "verify_num_draft_tokens",
        HookType.AFTER, _native_cost_table,
        "SGLang's planner without a user's file verifies everything, and asks for a file in its log",
        "native drafts without an offline cost file would never be scheduled",
    ),
    Hook(
        "speculative.dspark_components.dspark_planner.load_sts_calibration_from_path", "path", HookType.AROUND,
        _native_calibration,
        "SGLang's flag for a calibration also takes the files of sglang-dspark calibrate, which it cannot read",
        "a server with such a file would not start",
    ),
    INFO,
)  # fmt: skip


def install(hooks: tuple[Hook, ...]) -> None:
    """Register ``hooks`` with SGLang's own registry and apply them; again is a no-op (the registry remembers).

    Raises:
        Refusal: of the patches that together stand for a hook only some are in, or they are not those of this version.
    """
    for hook in needed(hooks, states_of_installed() if any(hook.patches for hook in hooks) else {}):
        target = whole_path(hook.target)
        if target in HookRegistry._patched:
            continue
        if _is_gap(target):
            _fill(target, hook)
        elif hook.parameters or target.startswith("torch."):
            HookRegistry.register(target, hook.function, hook.how)
    HookRegistry.apply_hooks()


def needed(hooks: tuple[Hook, ...], patches: Mapping[str, State]) -> list[Hook]:
    """The hooks without those whose patches are in SGLang's source. Raises as :func:`install`."""
    left = []
    for hook in hooks:
        found = {patches.get(name, State.OUT) for name in hook.patches}
        if State.CHANGED in found or len(found) > 1:
            raise Refusal(
                f"SGLang's source is neither the release nor patched as this package does ({', '.join(hook.patches)}); "
                "see sglang-dspark patch check, and install SGLang again."
            )
        if found != {State.IN}:
            left.append(hook)
    if len(left) < len(hooks):
        logger.info("DSPARK: SGLang is patched; %d of %d hooks are left out.", len(hooks) - len(left), len(hooks))
    return left


def whole_path(target: str) -> str:
    """The dotted path of a hook's target."""
    return target if target.startswith(("sglang.", "torch.")) else f"sglang.srt.{target}"


def _is_gap(target: str) -> bool:
    """Whether SGLang leaves the name None on this platform. Its registry must not wrap those: it would put the hook in
    the place of every module attribute that is None."""
    module, name = target.rsplit(".", 1)
    return getattr(pkgutil.resolve_name(module), name) is None


def _fill(target: str, hook: Hook) -> None:
    module, name = target.rsplit(".", 1)
    setattr(pkgutil.resolve_name(module), name, functools.partial(hook.function, None))
