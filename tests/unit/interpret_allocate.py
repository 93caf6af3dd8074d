"""Runs the Triton allocation kernels in the interpreter against the reference.

A program of its own, because Triton reads TRITON_INTERPRET when it is imported. Arguments: kernel (registers or
scratch), number of random cases, and narrow or wide (up to 4096 requests).
"""

import sys

import torch

from sglang_dspark.kernels import allocate_triton
from sglang_dspark.kernels.allocate_reference import allocate_reference
from tests.unit.allocate_cases import Case, adversarial_cases, random_case


def check(case: Case) -> None:
    requests = len(case.remap)
    lens = torch.full((requests,), -1, dtype=torch.int32)
    indptr = torch.full((requests + 1,), -1, dtype=torch.int32)
    allocate_triton.allocate_triton(case.confidence, case.remap, case.prior, case.budget, case.depth, lens, indptr)
    wanted = allocate_reference(case.confidence, case.remap, case.prior, case.budget, depth=case.depth)
    assert torch.equal(lens, wanted[0]) and torch.equal(indptr, wanted[1]), case


def main(kernel: str, cases: str, width: str) -> None:
    if kernel == "scratch":
        allocate_triton.IN_REGISTERS, allocate_triton.TILE = 0, 16
    generator, count = torch.Generator().manual_seed(int(cases)), 0
    for _ in range(int(cases)):
        check(random_case(generator))
        count += 1
    if width == "wide":
        allocate_triton.TILE = 2048
        shapes = [(1, 16), (4096, 16), (4096, 1), (1000, 7)]
    else:
        # Every class, at a size with more requests than a tile of the scratch kernel.
        shapes = [(1, 1), (21, 3)]
    for requests, gamma in shapes:
        # A budget of each eight or so, another one for each class: the interpreter takes a second for a case.
        for case in list(adversarial_cases(requests, gamma))[:: 1 if width == "wide" else 7]:
            check(case)
            count += 1
    print(f"{count} cases equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
