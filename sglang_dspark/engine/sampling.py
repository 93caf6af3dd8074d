"""Exact sampling in the verify pass: the chain sampler on CPU, and what a request may ask for everywhere.

SGLang 0.5.23's EAGLE verify takes the argmax on CPU whatever the temperature; on every device it ignores min-p and
custom logit processors. Here a CPU verify samples, from the very distribution that SGLang's plain CPU decoding samples
from, and what was asked for counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from torch import Tensor

# The sampling parameters of the batch that is being verified; SGLang's sampler functions are not told them.
_verifying: ContextVar[Any] = ContextVar("sampling_info of the batch in verify")
# Likewise the vocabulary of the draft that is drawing.
_drawing: ContextVar[Any] = ContextVar("reduced vocabulary of the draft", default=None)


def sample_verify(original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's eagle_sample with the batch's sampling parameters within reach of the functions below."""
    token = _verifying.set(batch.sampling_info)
    try:
        return original(verify_input, batch, *args, **kwargs)
    finally:
        _verifying.reset(token)


def process_verify(verify_input: Any, batch: Any, logits_output: Any) -> None:
    """Before SGLang's eagle_sample: custom logit processors on a verify's logits [R * (depth + 1), V], in place."""
    info = batch.sampling_info
    if info.has_custom_logit_processor and not batch.forward_mode.is_idle():
        width = len(verify_input.draft_token) // len(batch.seq_lens)
        apply_custom_logit_processor(logits_output.next_token_logits, info, width)


def verified_alone(info: Any) -> list[int]:
    """Batch rows whose drafts are not verified: a custom logit processor may look at what its request has said, and
    knows nothing of a run that is not said yet."""
    return sorted({row for entry in (info.custom_logit_processor or {}).values() for row in entry.rows})


def accept_drafts(original: Callable[..., Any], *, sampling_info: Any, **kwargs: Any) -> Any:
    """SGLang's accept_draft_tokens of block drafts, as sample_verify.

    On CPU it is told of no top-k and top-p, which the sampler below applies as SGLang's plain CPU sampler does.
    """
    token = _verifying.set(sampling_info)
    cpu = kwargs["target_logits"].is_cpu and sampling_info is not None
    try:
        return original(sampling_info=_Unfiltered(sampling_info) if cpu else sampling_info, **kwargs)
    finally:
        _verifying.reset(token)


class _Unfiltered:
    """Sampling parameters without top-k and top-p."""

    need_top_k_sampling = need_top_p_sampling = False

    def __init__(self, info: Any) -> None:
        self._info = info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


def sample_argmax_drafts(original: Callable[..., Any] | None, **kwargs: Any) -> None:
    """SGLang's tree_speculative_sampling_target_only for chains; ``original`` is None where SGLang has none (CPU)."""
    _sample(original, kwargs, draft=None)


def sample_sampled_drafts(original: Callable[..., Any], **kwargs: Any) -> None:
    """SGLang's chain_speculative_sampling_triton: drafts drawn from ``draft_probs``."""
    _sample(original, kwargs, draft=kwargs["draft_probs"])


def _sample(original: Callable[..., Any] | None, kwargs: dict[str, Any], draft: Tensor | None) -> None:
    """Run SGLang's sampler, or ours on CPU; both read and fill the same keyword arguments."""
    info = _verifying.get()
    probs: Tensor = kwargs["target_probs"]
    if not probs.is_cpu:
        assert original is not None
        kwargs["target_probs"] = filter_min_p(probs, info.min_ps) if info.need_min_p_sampling else probs
        original(**kwargs)
        return
    candidates, index = kwargs["candidates"], kwargs["retrive_index"]
    accepted, last = chain_sample(
        filter_cpu(probs, info.top_ks, info.top_ps, info.min_ps if info.need_min_p_sampling else None),
        candidates,
        kwargs["retrive_next_token"] >= 0,
        draft,
        kwargs["uniform_samples"],
        kwargs["uniform_samples_for_final_sampling"],
    )
    # predicts is indexed by node: the node of token j holds what follows it, a draft or the last token.
    position = torch.arange(candidates.shape[1])
    following = torch.where(position < accepted[:, None], candidates.roll(-1, dims=1), last[:, None])
    path = position <= accepted[:, None]
    kwargs["predicts"][index[path]] = following[path].to(kwargs["predicts"].dtype)
    kwargs["accept_index"].copy_(index.masked_fill(~path, -1))
    kwargs["accept_token_num"].copy_(accepted)


def chain_sample(
    target: Tensor, candidates: Tensor, proposed_next: Tensor, draft: Tensor | None, coins: Tensor, final_coins: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of chains: how many drafts are accepted, and the token after them.

    Args:
        target: [R, W, V] float32, the target's distribution after token j of each row.
        candidates: [R, W] int64, the anchor and W - 1 drafts.
        proposed_next: [R, W] bool, whether draft j + 1 follows token j in the verified chain.
        draft: [R, W - 1, V] float32, the distribution that each draft was sampled from; None where drafts are functions
            of the text (argmax), which is a distribution with all its mass on the draft.
        coins, final_coins: [R, W] and [R] float32, uniform in [0, 1).

    Returns:
        accepted [R] int64 and token [R] int64. A draft x is accepted with min(1, p(x) / q(x)); after a rejection the
        token comes from max(p - q, 0) normalised; after the last verified draft it comes from p (Leviathan et al. 2023,
        arXiv 2211.17192, algorithm 1).
    """
    requests, width, _ = target.shape
    rows = torch.arange(requests)
    accepted = torch.zeros(requests, dtype=torch.int64)
    alive = torch.ones(requests, dtype=torch.bool)
    for j in range(width - 1):
        x = candidates[:, j + 1]
        q = 1.0 if draft is None else draft[rows, j, x]
        alive = alive & proposed_next[:, j] & (coins[:, j] * q < target[rows, j, x])
        accepted += alive
    last = target[rows, accepted]
    rejected = proposed_next[rows, accepted]  # the chain went on, so its next draft was the one refused
    at = accepted.clamp(max=max(width - 2, 0))
    if draft is None:
        following = candidates[rows, (accepted + 1).clamp(max=width - 1)]
        residual = last.scatter(1, following[:, None], 0.0)
    else:
        residual = (last - draft[rows, at]).clamp_(min=0.0) if width > 1 else last
    # Rounding can leave nothing of a residual that is tiny in exact arithmetic; p itself is then within rounding of it.
    usable = rejected & (residual.sum(1) > 0)
    return accepted, inverse_cdf(torch.where(usable[:, None], residual, last), final_coins)


def inverse_cdf(weights: Tensor, coins: Tensor) -> Tensor:
    """One index [R] per row of non-negative ``weights`` [R, V], by coins [R] in [0, 1); never one of weight zero."""
    cdf = weights.double().cumsum(1)
    total = cdf[:, -1:].contiguous()
    at = torch.searchsorted(cdf, coins.double()[:, None] * total, right=True)
    end = torch.searchsorted(cdf, total)  # first index that reaches the total: the last with weight
    return torch.minimum(at, end).squeeze(1)


def filter_cpu(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor | None) -> Tensor:
    """[R, W, V] probabilities under top-k, top-p and min-p (each [R]), normalised.

    In the order and with the cut-offs of SGLang's plain CPU sampler (layers/sampler.py,
    top_k_top_p_min_p_sampling_from_probs_torch): top-k and top-p both on the full distribution, then min-p. Rows
    without a limit are not touched, and greedy rows (top-k 1) not sorted.
    """
    greedy = top_ks.flatten() == 1
    limited = (top_ks.flatten() < probs.shape[-1]) | (top_ps.flatten() < 1.0)
    if min_ps is not None:
        limited |= min_ps.flatten() > 0.0
    limited &= ~greedy
    if bool(greedy.any()):
        best = probs[greedy].argmax(-1, keepdim=True)
        probs[greedy] = torch.zeros_like(probs[greedy]).scatter_(-1, best, 1.0)
    if bool(limited.any()):
        rows = limited.nonzero().flatten()
        probs[rows] = _filter_sorted(
            probs[rows], *(x.flatten()[rows].view(-1, 1, 1) for x in (top_ks, top_ps)),
            None if min_ps is None else min_ps.flatten()[rows].view(-1, 1, 1),
        )  # fmt: skip
    return probs


def _filter_sorted(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor | None) -> Tensor:
    ordered, index = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    drop = (torch.arange(probs.shape[-1]) >= top_ks) | (before > top_ps)
    if min_ps is not None:
        drop |= ordered < ordered[..., :1] * min_ps
    kept = torch.zeros_like(probs).scatter_(-1, index, ordered.masked_fill(drop, 0.0))
    return kept.div_(kept.sum(-1, keepdim=True))


def filter_min_p(probs: Tensor, min_ps: Tensor) -> Tensor:
    """[R, W, V] probabilities, already under top-k and top-p, without those below min_p [R] times the largest."""
    kept = probs.masked_fill(probs < probs.amax(-1, keepdim=True) * min_ps.view(-1, 1, 1), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def draft_sample(original: Callable[..., Any], probs: Tensor, num_samples: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """SGLang's fast_sample; on CPU an unseeded draw goes through torch, since its argmax is a device kernel."""
    if not probs.is_cpu or kwargs.get("sampling_seed") is not None:
        return original(probs, num_samples, **kwargs)
    index = torch.multinomial(probs, num_samples)
    return probs.gather(1, index), index


class DraftVocabulary(NamedTuple):
    """Of a draft that proposes a part of the target's tokens only."""

    tokens: Tensor
    """[draft vocabulary] int64, the target's number of each of the draft's tokens, none of them twice."""
    size: int
    """Of the target's vocabulary."""

    def widen(self, probs: Tensor) -> Tensor:
        """[R, draft vocabulary] probabilities to [R, size], zero for what the draft never proposes."""
        return probs.new_zeros(len(probs), self.size).index_copy_(1, self.tokens, probs)


@contextmanager
def drawing_from(vocabulary: DraftVocabulary | None) -> Iterator[None]:
    """What is drawn inside is drawn from this vocabulary; None: from all of the target's."""
    token = _drawing.set(vocabulary)
    try:
        yield
    finally:
        _drawing.reset(token)


def propose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """SGLang's sample_draft_proposal; the distribution beside the draw is one over the target's tokens, which is what
    the rule for sampled drafts compares, and the draw itself stays a number of the draft's."""
    probs, drawn_p, drawn = original(*args, **kwargs)
    vocabulary = _drawing.get()
    return (probs if vocabulary is None else vocabulary.widen(probs)), drawn_p, drawn
