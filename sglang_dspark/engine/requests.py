"""What the scheduler needs to know of SGLang's requests, kept by their slot in the request table."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.engine.scheduler import StepBatch


class RequestTable:
    """Which request holds which slot, its verify rule, and whether it counts in pooled statistics. 80 bytes a slot."""

    def __init__(self, slots: int) -> None:
        self._holder: list[weakref.ref[Any] | None] = [None] * slots  # weak: a finished request must not be kept
        self._generation = np.zeros(slots, np.int64)
        self._clean = np.zeros(slots, np.bool_)
        self._rule = np.zeros(slots, np.int64)

    def describe(self, batch: Any) -> StepBatch:
        """The batch's requests, in its order. A slot whose request changed gets a new generation."""
        slots = np.fromiter((req.kv.req_pool_idx for req in batch.reqs), np.int64, len(batch.reqs))
        for slot, req in zip(slots, batch.reqs, strict=True):
            holder = self._holder[slot]
            if holder is None or holder() is not req:
                self._holder[slot] = weakref.ref(req)
                self._generation[slot] += 1
                self._clean[slot] = is_clean(req)
                self._rule[slot] = int(req.sampling_params.top_k != 1)  # SGLang writes temperature 0 as top-k 1
        kv_tokens = batch.seq_lens_sum
        if kv_tokens is None:
            # Under the overlap schedule only the device may know the lengths; the requests' own are a step old.
            kv_tokens = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)
        mine = self._generation[slots], self._rule[slots], self._clean[slots]
        left = np.fromiter((tokens_left(req) for req in batch.reqs), np.int64, len(slots))
        return StepBatch(slots, *mine, kv_tokens, batch.forward_iter or 0, left)

    def alive(self, batch: StepBatch) -> NDArray[np.bool_]:
        """[R] which requests of an earlier step still run: under the overlap schedule one that has ended takes part in
        one more step, of which nothing is learnt."""
        running = np.zeros(len(batch.slots), np.bool_)
        for row, (slot, generation) in enumerate(zip(batch.slots, batch.generations, strict=True)):
            holder = self._holder[slot]
            req = None if holder is None or self._generation[slot] != generation else holder()
            running[row] = req is not None and not (req.finished() or req.is_retracted)
        return running


def tokens_left(req: Any) -> int:
    """How many tokens the request may still give: SGLang has brought the limit within its context and pool."""
    return req.sampling_params.max_new_tokens - len(req.output_ids)


def is_clean(req: Any) -> bool:
    """Whether the request's acceptance says something of the draft: no grammar, penalty, logit bias or custom processor
    moves the target's distribution away from the one the draft was trained for."""
    params = req.sampling_params
    return not (
        req.grammar is not None
        or params.logit_bias
        or params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
        or req.custom_logit_processor
    )


def has_adapters(batch: Any) -> bool:
    """Whether a request runs under a LoRA adapter: SGLang tells whose token is whose by rows of one length."""
    return any(req.lora_id is not None for req in batch.reqs)
