"""Allocation on CPU tensors: bit-equal to the reference, and the reference to a definition anyone can read."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sglang_dspark.kernels import Allocation, allocate
from sglang_dspark.kernels.allocate_reference import allocate_reference, survival_rows
from sglang_dspark.schedule import survival
from tests.unit.allocate_cases import Case, adversarial_cases, random_case


def check(case: Case) -> None:
    got = allocate(case.confidence, case.remap, case.prior, case.budget, depth=case.depth)
    lens, indptr = allocate_reference(case.confidence, case.remap, case.prior, case.budget, depth=case.depth)
    assert got.verify_lens.dtype == got.qo_indptr.dtype == torch.int32
    assert torch.equal(got.verify_lens, lens) and torch.equal(got.qo_indptr, indptr), case


def check_random(cases: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(cases):
        check(random_case(generator))


def test_the_cpu_path_equals_the_reference_on_random_cases():
    check_random(5_000, seed=0)


@pytest.mark.long
def test_the_cpu_path_equals_the_reference_on_a_hundred_thousand_random_cases():
    check_random(100_000, seed=1)


@pytest.mark.parametrize("requests", [1, 2, 17, 256, 4096])
@pytest.mark.parametrize("gamma", [1, 7, 16])
def test_the_cpu_path_equals_the_reference_on_adversarial_input(requests: int, gamma: int):
    for case in adversarial_cases(requests, gamma):
        check(case)


def test_the_reference_is_the_ranking_by_survival_position_and_request():
    generator = torch.Generator().manual_seed(2)
    for _ in range(500):
        case = random_case(generator, most_requests=6, most_gamma=4)
        rows = survival_rows(case.confidence, case.remap, case.prior, case.depth).tolist()
        ranked = sorted(
            (-value, position, request)
            for request, row in enumerate(rows)
            for position, value in enumerate(row)
            if value > 0
        )
        expected = [1] * len(rows)
        for _, _, request in ranked[: max(int(case.budget), 0)]:
            expected[request] += 1
        lens, indptr = allocate_reference(case.confidence, case.remap, case.prior, case.budget, depth=case.depth)
        assert lens.tolist() == expected
        assert indptr.tolist() == [0, *np.cumsum(expected).tolist()]


def test_the_planner_and_the_allocation_multiply_the_same_way():
    confidence = torch.rand(64, 16, generator=torch.Generator().manual_seed(3))
    rows = survival_rows(confidence, torch.arange(64), torch.zeros(16), 16)
    assert np.array_equal(rows.numpy(), survival(confidence.numpy()))


def test_what_is_chosen_of_a_row_is_a_prefix_though_only_survivals_are_compared():
    generator = torch.Generator().manual_seed(4)
    for _ in range(500):
        case = random_case(generator)
        rows = survival_rows(case.confidence, case.remap, case.prior, case.depth)
        lens, _ = allocate(case.confidence, case.remap, case.prior, case.budget, depth=case.depth)
        chosen = torch.arange(case.depth) < (lens[:, None] - 1)
        if chosen.any() and (rows[~chosen] > 0).any():
            assert rows[chosen].min() >= rows[~chosen].max()


def test_ties_go_by_position_then_request():
    confidence = torch.ones(3, 2)
    for budget, lens in ((1, [2, 1, 1]), (2, [2, 2, 1]), (4, [3, 2, 2]), (5, [3, 3, 2])):
        got = allocate(confidence, torch.arange(3), torch.zeros(2), torch.tensor(budget))
        assert got.verify_lens.tolist() == lens


def test_a_request_without_a_row_counts_with_the_prior():
    confidence = torch.tensor([[0.9, 0.9], [0.1, 0.1]])
    got = allocate(confidence, torch.tensor([1, -1, 0]), torch.tensor([0.5, 0.1]), torch.tensor(3))
    assert got.verify_lens.tolist() == [1, 2, 3]


def test_positions_past_the_depth_are_not_verified():
    got = allocate(torch.ones(2, 4), torch.arange(2), torch.ones(4), torch.tensor(8), depth=1)
    assert got.verify_lens.tolist() == [2, 2]
    assert allocate(torch.ones(2, 4), torch.arange(2), torch.ones(4), torch.tensor(8), depth=0).qo_indptr[-1] == 2


def test_a_budget_may_be_an_int_on_the_host():
    confidence, rows, prior = (
        torch.rand(5, 4, generator=torch.Generator().manual_seed(6)),
        torch.arange(5),
        torch.ones(4),
    )
    for budget in (-1, 0, 7, 99):
        as_int, as_tensor = (allocate(confidence, rows, prior, b) for b in (budget, torch.tensor(budget)))
        assert torch.equal(as_int.verify_lens, as_tensor.verify_lens)


@pytest.mark.parametrize("remap", [[0, 1, 2], [0, 2, 1], [0, 0, 0], [0, 1], [2, 1, 0, 0], [-1, -1, -1], [0, 1, -1]])
def test_a_remap_is_followed_whether_or_not_it_is_every_requests_own_row(remap: list[int]):
    confidence = torch.tensor([[0.9, 0.8], [0.7, 0.2], [0.4, 0.3]])
    check(Case("remap", confidence, torch.tensor(remap), torch.tensor([0.6, 0.5]), torch.tensor(3), 2))


def test_out_is_filled_in_place():
    out = Allocation(torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    got = allocate(torch.ones(2, 3), torch.arange(2), torch.ones(3), torch.tensor(4), out=out)
    assert got is out and out.verify_lens.tolist() == [3, 3] and out.qo_indptr.tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    "change",
    [
        {"confidence": torch.ones(2, 3, dtype=torch.float64)},
        {"confidence": torch.ones(2, 17), "prior": torch.ones(17)},
        {"prior": torch.ones(2)},
        {"remap": torch.zeros(2, dtype=torch.int32)},
        {"remap": torch.zeros(4097, dtype=torch.int64)},
        {"depth": 4},
        {"depth": -1},
    ],
)
def test_shapes_and_types_it_was_not_made_for_are_refused(change: dict):
    arguments = {
        "confidence": torch.ones(2, 3),
        "remap": torch.arange(2),
        "prior": torch.ones(3),
        "budget": torch.tensor(1),
    }
    with pytest.raises(ValueError, match="allocate"):
        allocate(**{**arguments, **change})


def test_two_threads_allocate_at_once_and_a_result_outlives_the_next_call():
    cases = [(torch.rand(64, 5, generator=torch.Generator().manual_seed(seed)), 40 + seed) for seed in range(8)]
    remap, prior = torch.arange(64), torch.zeros(5)

    def lens(case: tuple[torch.Tensor, int]) -> list[list[int]]:
        kept = [allocate(case[0], remap, prior, case[1]).verify_lens for _ in range(200)]
        return [one.tolist() for one in kept]

    wanted = [lens(case)[:1] * 200 for case in cases]
    assert len({str(one[0]) for one in wanted}) == len(cases)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lens, cases)) == wanted
