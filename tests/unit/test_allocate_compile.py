"""The Triton kernels compile for GPUs that are not here, without a spill and without flushing denormals."""

import pytest

from sglang_dspark.kernels import allocate_triton
from sglang_dspark.kernels.ptxas import compile_for

POINTERS = {
    "confidence": "*fp32",
    "remap": "*i64",
    "prior": "*fp32",
    "budget": "*i32",
    "lens": "*i32",
    "indptr": "*i32",
}
SCALARS = {"requests": "i32", "depth": "i32", "stride": "i32"}
# Every shape with 16,384 padded candidates that a batch of up to 4096 requests can have.
LARGEST = [(2048, 8), (1024, 16), (4096, 4)]
SMALLER = [(4096, 2), (4096, 1), (2048, 4), (512, 16), (256, 8), (64, 8), (32, 1)]


def report(kernel, signature, constants, capability: int, num_warps: int, capsys) -> None:
    try:
        compiled = compile_for(kernel, signature, constants, capability=capability, num_warps=num_warps)
    except FileNotFoundError:
        pytest.skip("no ptxas on this machine")
    with capsys.disabled():
        size = ", ".join(f"{name}={value}" for name, value in constants.items())
        print(f"\nptxas sm_{capability} {size}, {num_warps} warps: ", end="")
        print(f"{compiled.registers} registers, {compiled.spill_bytes} bytes spilled", end=" ")
    assert compiled.spill_bytes == 0
    # Survival may be a denormal; flushed to 0 it would not be chosen, and the reference would differ.
    assert ".ftz" not in compiled.ptx


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("block", "gamma"), LARGEST)
def test_the_largest_blocks_do_not_spill(block: int, gamma: int, capability: int, capsys):
    constants = {"GAMMA": gamma, "BLOCK": block}
    warps = allocate_triton.warps(block, gamma)
    report(allocate_triton.allocate_kernel, {**POINTERS, **SCALARS}, constants, capability, warps, capsys)


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("block", "gamma"), SMALLER)
def test_smaller_blocks_do_not_spill(block: int, gamma: int, capability: int, capsys):
    constants = {"GAMMA": gamma, "BLOCK": block}
    warps = allocate_triton.warps(block, gamma)
    report(allocate_triton.allocate_kernel, {**POINTERS, **SCALARS}, constants, capability, warps, capsys)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_scratch_kernel_does_not_spill_at_4096_requests_of_16(capability: int, capsys):
    signature = {**POINTERS, "keys": "*i32", **SCALARS}
    constants = {"GAMMA": 16, "TILES": 4096 // allocate_triton.TILE, "BLOCK": allocate_triton.TILE}
    warps = allocate_triton.SCRATCH_WARPS
    report(allocate_triton.allocate_scratch_kernel, signature, constants, capability, warps, capsys)
