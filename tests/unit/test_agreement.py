"""Ranks that were started differently are refused, and what one decides all do: two processes, no server."""

import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dspark.config import Refusal
from sglang_dspark.engine.agreement import Agreement, OutOfStep, contents, refuse_differences
from tests.unit.agreement_ranks import batch_of, decide, fall_behind, scheduler

ALIKE = {"version": "1", "num_steps": 4, "profile_seconds": 10.0, "cost_table": None}


def test_ranks_that_were_started_alike_pass():
    refuse_differences([ALIKE, dict(ALIKE), dict(ALIKE)])
    refuse_differences([ALIKE])


@pytest.mark.parametrize("name", [*ALIKE, "unknown to the others"])
@pytest.mark.parametrize("rank", (1, 2))
def test_any_setting_on_any_rank_that_differs_is_named(name, rank):
    settings = [dict(ALIKE) for _ in range(3)]
    settings[rank][name] = "another"
    with pytest.raises(Refusal) as refused:
        refuse_differences(settings)
    sentence = str(refused.value)
    assert f"rank {rank} was started with {name} 'another'" in sentence and sentence.endswith(".")


def ranks(tmp_path, work, wanted, *args):
    """What the wanted ranks of two answer, in their order. A rank whose partner has failed may never answer."""
    context = multiprocessing.get_context("fork")  # torch is loaded here already
    ends = [context.Pipe(duplex=False) for _ in range(2)]
    file = tmp_path / "rendezvous"
    both = [context.Process(target=work, args=(r, str(file), *args, ends[r][1].send), daemon=True) for r in range(2)]
    for rank in both:
        rank.start()
    for _, sends in ends:
        sends.close()  # so that a rank that ends without an answer is noticed
    try:
        return [ends[r][0].recv() for r in wanted if ends[r][0].poll(120)]
    finally:
        for rank in both:
            rank.kill()


@pytest.mark.parametrize("steps", (1_000, pytest.param(10_000, marks=pytest.mark.long)))
def test_two_ranks_decide_alike_with_confidences_an_ulp_apart(tmp_path, steps):
    (first, *_), (second, plans, lengths) = ranks(tmp_path, decide, (0, 1), steps)
    assert first == second
    assert plans > steps / 100 and lengths > steps / 10  # each on its own would have decided otherwise


@pytest.mark.parametrize(
    "what, rank", [("a step behind", 1), ("other requests", 1), ("other lengths of the same requests", 1),
                   ("no plan", 0), ("no lengths", 1)]
)  # fmt: skip
def test_a_rank_that_is_not_where_the_first_is_fails_with_a_sentence(tmp_path, what, rank):
    (said,) = ranks(tmp_path, fall_behind, (rank,), what)
    assert said.startswith(f"Tensor-parallel rank {rank}") and said.endswith("has to be started again.")
    assert ("in vain" if what.startswith("no ") else "runs step 2") in said


def test_lengths_of_another_step_are_found_out_once_they_are_on_the_host():
    # As on a device, whose collectives do not wait for the host: the first rank's lengths are one step ahead.
    def broadcast(message, src):
        message[0] += 1

    group = SimpleNamespace(world_size=2, rank_in_group=1, broadcast=broadcast)
    agreement = Agreement(group)
    agreement._broadcast = lambda values: values
    batch, plan = batch_of(np.random.default_rng(0), 3), scheduler().verify_all(3)
    with pytest.raises(OutOfStep, match="took the lengths of step 2 for those of step 1"):
        for _ in range(4):
            agreement.plan(batch, plan, True)
            agreement.lengths(torch.ones(3, dtype=torch.int32))


def test_a_file_counts_by_what_it_holds(tmp_path):
    one, other, missing = tmp_path / "one", tmp_path / "other", tmp_path / "missing"
    one.write_text("table")
    other.write_text("table")
    assert contents(one) == contents(other) != contents(missing) is None
    other.write_text("another table")
    assert contents(one) != contents(other)
    assert contents(None) is None and contents(tmp_path) is None


def test_alone_nothing_is_sent():
    agreement = Agreement(SimpleNamespace(world_size=1, rank_in_group=0))
    plan, lens = scheduler().verify_all(3), torch.ones(3, dtype=torch.int32)
    assert agreement.plan(None, plan, False) == (plan, False)
    assert agreement.lengths(lens) is lens and agreement.first_says(5) == 5 and agreement.is_first
    agreement.refuse_differences(ALIKE)
