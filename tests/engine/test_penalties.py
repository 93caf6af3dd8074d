"""Penalties inside a verified run: every row is penalised as if its tokens had been said one by one."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from sglang_dspark.engine.penalties import count_output, penalise

VOCAB, END = 11, 10
KINDS = {
    "none": {},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.3},
    "min": {"min_new_tokens": 6},
    "all": {"frequency_penalty": 0.3, "presence_penalty": -0.4, "repetition_penalty": 1.3, "min_new_tokens": 4},
}


def request(**wishes):
    params = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        **wishes,
    }
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=END)
    sampling = SimpleNamespace(stop_token_ids=None, **params)
    return SimpleNamespace(
        sampling_params=sampling, eos_token_ids=None, tokenizer=tokenizer, output_ids=[], retraction_count=0
    )


class Batch(SimpleNamespace):
    """As much of a ScheduleBatch as penalties need; can be referred to weakly."""


def batch_of(reqs):
    batch = Batch(reqs=reqs, device="cpu")
    kinds = {
        BatchedFrequencyPenalizer, BatchedPresencePenalizer, BatchedRepetitionPenalizer, BatchedMinNewTokensPenalizer,
    }  # fmt: skip
    orchestrator = BatchedPenalizerOrchestrator(VOCAB, batch, kinds)
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=orchestrator)
    return batch


def penalties_of(orchestrator, requests):
    """What SGLang's sampling_info.update_penalties sums up."""
    additive = torch.zeros(requests, VOCAB)
    orchestrator.accumulate_additive_penalties(additive)
    return SimpleNamespace(
        acc_additive_penalties=additive, acc_scaling_penalties=orchestrator.accumulate_scaling_penalties()
    )


def one_by_one(logits, drafts, wishes, said):
    """[R, depth + 1, V] by SGLang's penalizers as plain decoding feeds them."""
    requests, depth = drafts.shape
    batch = batch_of([request(**w) for w in wishes])
    orchestrator = batch.sampling_info.penalizer_orchestrator
    for column in said.T:
        orchestrator.cumulate_output_tokens(column)
    rows = []
    for j in range(depth + 1):
        if j:
            orchestrator.cumulate_output_tokens(drafts[:, j - 1])
        row, sums = logits[:, j].clone(), penalties_of(orchestrator, requests)
        row += sums.acc_additive_penalties
        if sums.acc_scaling_penalties is not None:
            scale = sums.acc_scaling_penalties
            row = torch.where(row < 0, row * scale, row / scale)
        rows.append(row)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("steps", ((1, 1, 1, 1), (4,), (1, 3), (2, 2)))
@pytest.mark.parametrize("names", (*([name] for name in KINDS), list(KINDS)), ids="-".join)
def test_a_run_is_penalised_as_if_said_one_by_one(names, steps):
    torch.manual_seed(0)
    wishes = [KINDS[name] for name in names]
    requests, depth, total = len(wishes), 4, sum(steps)
    said = torch.randint(0, 5, (requests, total))  # few tokens, so that they repeat
    drafts = torch.randint(0, 5, (requests, depth))
    logits = torch.randn(requests, depth + 1, VOCAB)
    batch = batch_of([request(**w) for w in wishes])
    start = 0
    for count in steps:  # a verify accepts so many at once
        for req, row in zip(batch.reqs, said[:, start : start + count].tolist(), strict=True):
            req.output_ids += row
        count_output(batch)
        start += count
    got, info = logits.clone().flatten(0, 1), penalties_of(batch.sampling_info.penalizer_orchestrator, requests)
    penalise(got, drafts, info, batch.dspark_penalties)
    want = one_by_one(logits, drafts, wishes, said)
    assert torch.allclose(got.view_as(want), want, atol=1e-6)
    assert info.acc_additive_penalties is None and info.acc_scaling_penalties is None


def test_a_request_that_was_thrown_back_is_counted_from_its_beginning():
    req = request(**KINDS["frequency"])
    batch = batch_of([req])
    req.output_ids += [1, 2]
    count_output(batch)
    req.retraction_count += 1
    again = batch_of([req])  # its prefill made new sums
    req.output_ids += [2]
    count_output(again)
    sums = penalties_of(again.sampling_info.penalizer_orchestrator, 1).acc_additive_penalties
    assert sums[0, :4].tolist() == pytest.approx([0.0, -0.7, -1.4, 0.0])
