"""What is kept of SGLang's requests by their slot: who holds it, how long its text is, and whether it still runs."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.engine.requests import RequestTable
from sglang_dspark.engine.scheduler import StepScheduler
from tests.pretend_request import Request


def batch_of(*requests, total=None, lens=None):
    return SimpleNamespace(reqs=list(requests), seq_lens_sum=total, seq_lens_cpu=lens, forward_iter=1)


@pytest.mark.parametrize("total, expected", ((50, 50), (None, 4 + 1 + 7 + 3)))
def test_the_text_of_a_batch_is_counted_also_where_only_the_device_knows_its_lengths(total, expected):
    table = RequestTable(4)
    assert table.describe(batch_of(Request(0), Request(2, prompt=7, said=3), total=total)).kv_tokens == expected


def test_of_an_earlier_step_those_still_run_that_have_not_ended_and_hold_their_slot():
    table = RequestTable(8)
    runs, ended, retracted, replaced, gone = (Request(slot) for slot in range(5))
    step = table.describe(batch_of(runs, ended, retracted, replaced, gone))
    assert table.alive(step).all()
    ended.ended = retracted.is_retracted = True
    newcomer = Request(3)
    table.describe(batch_of(runs, newcomer))
    del gone
    assert table.alive(step).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("slots", (1, 3, 32, 100))
def test_every_size_of_batch_is_allocated_once_before_serving(slots):
    it, seen = StepScheduler(slots, 3), []
    allocate = it.allocate
    it.allocate = lambda plan, confidence: seen.append(len(confidence)) or allocate(plan, confidence)
    it.compile_allocation(torch.device("cpu"))
    blocks = {1 << (requests - 1).bit_length() for requests in range(1, slots + 1)}
    assert {1 << (requests - 1).bit_length() for requests in seen} == blocks and max(seen) == slots
