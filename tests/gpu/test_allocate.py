"""The allocation kernels on a GPU: bit-equal to the reference, one launch, no host read, capturable into a graph."""

from collections.abc import Iterator

import pytest
import torch

from sglang_dspark.kernels import Allocation, allocate
from sglang_dspark.kernels.allocate_reference import allocate_reference
from tests.unit.allocate_cases import Case, adversarial_cases, random_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RANDOM_CASES = 20_000
# One request, odd sizes, every largest block that is held in registers, and what lies in scratch memory.
SHAPES = [(1, 1), (17, 3), (256, 7), (1000, 7), (2048, 8), (1024, 16), (4096, 4), (2048, 16), (4096, 7), (4096, 16)]


@pytest.fixture(autouse=True)
def waiting_allowed_again() -> Iterator[None]:
    """A case that failed in the middle of `check` must not make the next one raise."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def on_gpu(case: Case) -> dict[str, torch.Tensor]:
    return {name: getattr(case, name).cuda() for name in ("confidence", "remap", "prior", "budget")}


def empty(requests: int) -> Allocation:
    return Allocation(
        torch.full((requests,), -1, dtype=torch.int32, device="cuda"),
        torch.full((requests + 1,), -1, dtype=torch.int32, device="cuda"),
    )


def check(case: Case) -> None:
    inputs, out = on_gpu(case), empty(len(case.remap))
    torch.cuda.set_sync_debug_mode("error")  # a host read raises
    allocate(**inputs, depth=case.depth, out=out)
    torch.cuda.set_sync_debug_mode("default")
    equals_reference(out, case)


def equals_reference(out: Allocation, case: Case) -> None:
    lens, indptr = allocate_reference(case.confidence, case.remap, case.prior, case.budget, depth=case.depth)
    assert torch.equal(out.verify_lens.cpu(), lens) and torch.equal(out.qo_indptr.cpu(), indptr), case


def test_the_kernel_equals_the_reference_on_random_cases():
    generator = torch.Generator().manual_seed(0)
    for _ in range(RANDOM_CASES):
        check(random_case(generator, most_requests=64))


@pytest.mark.parametrize(("requests", "gamma"), SHAPES)
def test_the_kernel_equals_the_reference_on_every_adversarial_class(requests: int, gamma: int):
    for case in adversarial_cases(requests, gamma):
        check(case)


@pytest.mark.parametrize(("requests", "gamma"), [(256, 7), (4096, 16)])
def test_a_captured_graph_follows_the_inputs_that_it_is_replayed_with(requests: int, gamma: int):
    cases = list(adversarial_cases(requests, gamma))
    inputs, out = on_gpu(cases[0]), empty(requests)
    allocate(**inputs, depth=gamma, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        allocate(**inputs, depth=gamma, out=out)
    for case in cases:
        for name, tensor in on_gpu(case).items():
            inputs[name].copy_(tensor)
        graph.replay()
        equals_reference(out, case)


@pytest.mark.parametrize(("requests", "gamma"), [(256, 7), (4096, 16)])
def test_an_allocation_is_one_launch(requests: int, gamma: int):
    case = next(adversarial_cases(requests, gamma))
    inputs, out = on_gpu(case), empty(requests)
    allocate(**inputs, depth=gamma, out=out)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        allocate(**inputs, depth=gamma, out=out)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        pytest.skip("the profiler sees no kernels on this machine")
    assert len(kernels) == 1, kernels


def test_a_budget_on_the_host_is_refused():
    with pytest.raises(ValueError, match="not an int"):
        allocate(torch.ones(2, 3).cuda(), torch.arange(2).cuda(), torch.ones(3).cuda(), 4)
