"""The two attention operations of SGLang's CPU backend: decode (one query a request) and extend (any number).

`IntelAMXAttnBackend` (SGLang 0.5.23, srt/layers/attention/intel_amx_backend.py) calls them once per layer. They have
the sgl_kernel operations' arguments; attn_logits and max_len_extend, which size the native kernels' scratch, are not
used.

Shapes: query [tokens, Hq, D], output [tokens, Hq, Dv], buffers [slots, Hkv, D or Dv], req_to_token [pool rows, width]
int32, seq_lens [R] int64 with the new tokens counted. sliding_window_size is the number of keys a query sees, itself
included; 0: all.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_dspark.engine.cpu.attention_math import attend
from sglang_dspark.engine.cpu.attention_plan import GATHER_BYTES, QUERY_BLOCK, Group, Lengths, build_group, cut, group

Tensors = tuple[Tensor | None, ...]


class PlanCache:
    """Holds the plans of the forward pass in progress.

    The layers of one forward pass hand over the same tensor objects, and every forward pass makes new ones. So a plan
    is valid while the objects are the same (they are kept here, so that no new one can take their place) and
    unmodified.
    """

    def __init__(self) -> None:
        self._tensors: Tensors = ()
        self._versions: tuple[int, ...] = ()
        self._plans: dict[tuple, list[Group]] = {}

    def get(self, tensors: Tensors, options: tuple, make: Callable[[], list[Group]]) -> list[Group]:
        """The plan for these tensors and options, made by `make` if this forward pass has none yet."""
        # Tensors made in inference mode count no versions.
        versions = tuple(-1 if t is None or t.is_inference() else t._version for t in tensors)
        same = len(tensors) == len(self._tensors) and all(map(lambda a, b: a is b, tensors, self._tensors))
        if not same or versions != self._versions:
            self._tensors, self._versions, self._plans = tensors, versions, {}
        if options not in self._plans:
            self._plans[options] = make()
        return self._plans[options]


_decode_plans, _extend_plans = PlanCache(), PlanCache()


def _max_slots(k_buffer: Tensor, v_buffer: Tensor) -> int:
    row = max(k_buffer.shape[1] * k_buffer.shape[2], v_buffer.shape[1] * v_buffer.shape[2])
    return max(1, GATHER_BYTES // (row * k_buffer.element_size()))


def _self_start(encoder_lens: Tensor | None, like: Tensor) -> Tensor:
    """Column of req_to_token where each request's text starts: after its encoder tokens, if the model has any."""
    return torch.zeros_like(like, dtype=torch.int64) if encoder_lens is None else encoder_lens.long()


def decode_attention_cpu(
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Store key and value [R, Hkv, D] at slots loc [R], then attend: one query a request, all of its context."""
    if key is not None and value is not None:
        k_buffer.index_copy_(0, loc, key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype))
        v_buffer.index_copy_(0, loc, value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype))
    if is_cross_attn:
        output.zero_()  # requests without encoder tokens attend to nothing
    max_slots = _max_slots(k_buffer, v_buffer)

    def make() -> list[Group]:
        context = encoder_lens if is_cross_attn and encoder_lens is not None else seq_lens
        start = torch.zeros_like(seq_lens) if is_cross_attn else _self_start(encoder_lens, seq_lens)
        requests = [Lengths(r, 1, length) for r, length in enumerate(context.tolist())]
        return [
            build_group(blocks, req_to_token, req_pool_indices, start, causal=False, window=0)
            for blocks in group(cut(requests, causal=False, window=sliding_window_size), max_slots)
        ]

    tensors = (attn_logits, req_to_token, req_pool_indices, seq_lens, encoder_lens)
    for part in _decode_plans.get(tensors, (is_cross_attn, sliding_window_size, max_slots), make):
        attend(
            part,
            query,
            k_buffer,
            v_buffer,
            output,
            scale=sm_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            logit_cap=logit_cap,
            sinks=sinks,
        )


def extend_attention_cpu(
    q_extend: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Let every request's last extend_seq_lens[r] tokens, rows extend_start_loc[r].. of q_extend, attend to its
    context.

    Their keys and values are already in the buffers (the backend stores them first). k_extend and v_extend are read
    only where they have other heads than the buffers, which is how multi-head latent attention passes uncompressed
    keys: then the new tokens attend to one another alone. tree_mask: bool, flat [R * n * n], as QLEN_ONLY of `tree`;
    requests then have n tokens each. Lengths may differ between requests otherwise; that is what a ragged verify pass
    needs. Rows past them all are padding, and get zeros: what they leave in the KV pool's padding slot must be finite.
    """
    k_source, v_source = k_buffer, v_buffer
    o_extend[int(extend_seq_lens.sum()) :] = 0.0
    if k_extend is not None and v_extend is not None and k_extend.shape[1] != k_buffer.shape[1]:
        k_source, v_source = k_extend, v_extend
    own_keys = k_source is not k_buffer
    if is_cross_attn:
        o_extend.zero_()  # requests without encoder tokens attend to nothing
    max_slots = _max_slots(k_source, v_source)
    causal = is_causal and tree_mask is None

    def make() -> list[Group]:
        starts, lengths = extend_start_loc.tolist(), extend_seq_lens.tolist()
        if own_keys:
            table, rows, first = (
                torch.arange(k_source.shape[0])[None],
                torch.zeros_like(req_pool_indices),
                extend_start_loc,
            )
            context = extend_seq_lens
        else:
            table, rows = req_to_token, req_pool_indices
            first = torch.zeros_like(seq_lens) if is_cross_attn else _self_start(encoder_lens, seq_lens)
            context = encoder_lens if is_cross_attn and encoder_lens is not None else seq_lens
        requests = [Lengths(*r) for r in zip(starts, lengths, context.tolist(), strict=True)]
        tree = None if tree_mask is None else tree_mask.view(len(requests), lengths[0], lengths[0])
        blocks = cut(requests, causal, sliding_window_size, QUERY_BLOCK if tree is None else lengths[0])
        return [
            build_group(part, table, rows, first, causal, sliding_window_size, tree)
            for part in group(blocks, max_slots)
        ]

    tensors = (extend_start_loc, extend_seq_lens, seq_lens, req_to_token, req_pool_indices, encoder_lens, tree_mask)
    options = (own_keys, is_cross_attn, causal, sliding_window_size, max_slots)
    for part in _extend_plans.get(tensors, options, make):
        attend(
            part,
            q_extend,
            k_source,
            v_source,
            o_extend,
            scale=sm_scale,
            k_scale=1.0 if own_keys else k_scale,
            v_scale=1.0 if own_keys else v_scale,
            logit_cap=logit_cap,
            sinks=sinks,
        )
