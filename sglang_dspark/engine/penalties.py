"""Penalties inside a verified run: token j of it is judged as plain decoding would, with the j before it said.

SGLang 0.5.23's EAGLE verify is relaxed here: it penalises a whole run by what was said before it, and of a run that was
accepted it counts the last token only. What comes out then depends on how many tokens a step verifies, which must never
be. Under overlap scheduling the host knows a step's tokens one step late, for us as for SGLang's plain decoding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.utils.common import is_pin_memory_available
from torch import Tensor


class Penalties(NamedTuple):
    """What a step's R requests are penalised by, beyond the sums that SGLang hands to the verify."""

    frequency: Tensor | None
    """[R] for each time a token was said; None where no request asks for it, as with the others."""
    presence: Tensor | None
    """[R] for a token that was said at all."""
    repetition: Tensor | None
    """[R] by which the logit of such a token is divided, or multiplied if negative."""
    seen: Tensor | None
    """[R, V] bool, tokens that presence and repetition count already."""
    missing: Tensor | None
    """[R] tokens still to be said before the request may end."""
    ends: Tensor | None
    """[R, V] bool, the tokens that end it."""


def count_output(batch: Any) -> None:
    """In place of SGLang's cumulate_penalty_output_tokens: count all tokens since the last step, not only one.

    Leaves the step's :class:`Penalties` on the batch, as ``dspark_penalties``.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    rows, tokens = [], []
    for row, req in enumerate(batch.reqs):
        counted, epoch = getattr(req, "dspark_counted", (0, 0))
        if epoch != req.retraction_count:
            counted = 0  # thrown back since: its sums start anew with the prefill
        new = req.output_ids[counted:]
        req.dspark_counted = (counted + len(new), req.retraction_count)
        rows += [row] * len(new)
        tokens += new
    found = {kind: p for kind, p in orchestrator.penalizers.items() if p.is_prepared()}
    pinned = is_pin_memory_available(batch.device)  # as SGLang does, so that the copy waits for no forward
    said = torch.tensor([rows, tokens], dtype=torch.int64, pin_memory=pinned)
    add_tokens(found, *said.to(batch.device, non_blocking=True))
    batch.dspark_penalties = of_penalizers(found)


def add_tokens(found: dict[type, Any], rows: Tensor, tokens: Tensor) -> None:
    """Add ``tokens`` [n], said by the requests in ``rows`` [n], to the sums of SGLang's penalizers."""
    if BatchedFrequencyPenalizer in found:
        it = found[BatchedFrequencyPenalizer]
        it.cumulated_frequency_penalties.index_put_((rows, tokens), it.frequency_penalties[rows, 0], accumulate=True)
    if BatchedPresencePenalizer in found:
        it = found[BatchedPresencePenalizer]
        it.cumulated_presence_penalties[rows, tokens] = it.presence_penalties[rows, 0]
    if BatchedRepetitionPenalizer in found:
        it = found[BatchedRepetitionPenalizer]
        it.cumulated_repetition_penalties[rows, tokens] = it.repetition_penalties[rows, 0]
    if BatchedMinNewTokensPenalizer in found:
        it = found[BatchedMinNewTokensPenalizer]
        it.len_output_tokens.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32)[:, None])


def of_penalizers(found: dict[type, Any]) -> Penalties:
    """What the verify needs of SGLang's penalizers. Copies: the next step's counting must not reach into this one."""
    frequency = presence = repetition = seen = missing = ends = None
    if BatchedFrequencyPenalizer in found:
        frequency = found[BatchedFrequencyPenalizer].frequency_penalties[:, 0]
    if BatchedPresencePenalizer in found:
        it = found[BatchedPresencePenalizer]
        presence, seen = it.presence_penalties[:, 0], it.cumulated_presence_penalties != 0
    if BatchedRepetitionPenalizer in found:
        it = found[BatchedRepetitionPenalizer]
        repetition, repeated = it.repetition_penalties[:, 0], it.cumulated_repetition_penalties != 1
        seen = repeated if seen is None else seen | repeated
    if BatchedMinNewTokensPenalizer in found:
        it = found[BatchedMinNewTokensPenalizer]
        missing, ends = (it.min_new_tokens - it.len_output_tokens)[:, 0], it.stop_token_penalties != 0
    return Penalties(frequency, presence, repetition, seen, missing, ends)


def penalise_verify(verify_input: Any, batch: Any, logits_output: Any) -> None:
    """Before SGLang's eagle_sample: penalise the step's runs by what :func:`count_output` left on the batch."""
    info = batch.sampling_info
    if info.acc_additive_penalties is not None and not batch.forward_mode.is_idle():
        drafts = verify_input.draft_token.view(len(batch.seq_lens), -1)[:, 1:]
        penalise(logits_output.next_token_logits, drafts, info, batch.dspark_penalties)


def penalise(logits: Tensor, drafts: Tensor, info: Any, penalties: Penalties) -> None:
    """Penalise logits [R * (depth + 1), V] of a verified run in place, each row with the drafts [R, depth] before it.

    info: SGLang's sampling_info of the forward, whose sums are used up here, so that its own code adds nothing more.
    """
    requests, depth = drafts.shape
    rows = logits.view(requests, depth + 1, -1)
    after = torch.arange(depth + 1, device=logits.device)
    if info.acc_additive_penalties is not None:
        for j in range(depth + 1):
            rows[:, j] += _additive(info.acc_additive_penalties, j, penalties)
    # Draft i is said before every row j > i.
    said = [(torch.arange(requests, device=logits.device)[:, None], after[i + 1 :], drafts[:, i, None])
            for i in range(depth)]  # fmt: skip
    first = [_first(drafts, i, penalties.seen) for i in range(depth)]
    for i in range(depth):
        if penalties.frequency is not None:
            rows[said[i]] -= penalties.frequency[:, None]
        if penalties.presence is not None:
            rows[said[i]] -= (penalties.presence * first[i])[:, None]
    if info.acc_scaling_penalties is not None:
        assert penalties.repetition is not None
        apply_scaling_penalties(logits, info.acc_scaling_penalties.repeat_interleave(depth + 1, dim=0))
        for i in range(depth):
            factor = torch.where(first[i], penalties.repetition, 1.0)[:, None]
            value = rows[said[i]]
            rows[said[i]] = torch.where(value < 0, value * factor, value / factor)
    info.acc_additive_penalties = info.acc_scaling_penalties = None


def _additive(before: Tensor, said: int, penalties: Penalties) -> Tensor:
    """[R, V] what is added to a row with ``said`` drafts before it: ``before``, the bar on ending lifted in time."""
    if penalties.missing is None or penalties.ends is None or not said:
        return before
    lifted = (penalties.missing > 0) & (penalties.missing <= said)
    # Under the bar all sums are lost in minus infinity. A token under it was never said, so what it leaves is 0.
    return before.masked_fill(lifted[:, None] & penalties.ends, 0.0)


def _first(drafts: Tensor, i: int, seen: Tensor | None) -> Tensor:
    """[R] whether draft i was said neither before the run nor earlier in it."""
    known = (drafts[:, :i] == drafts[:, i : i + 1]).any(dim=1)
    if seen is not None:
        known = known | seen.gather(1, drafts[:, i : i + 1])[:, 0]
    return ~known
