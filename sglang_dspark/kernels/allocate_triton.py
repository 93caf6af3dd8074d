"""Allocation in one Triton launch of one block: survival, top-B by radix descent on float bits, ties, prefix sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Candidates (padded requests x padded positions) whose keys one block holds in registers. ptxas reports no spill up to
# here for sm_80, sm_90 and sm_100 (tests/unit/test_allocate_compile.py); beyond, the keys lie in a scratch buffer.
IN_REGISTERS = 16384
# Rows of a tile of the scratch kernel, and its warps: four rows a thread. At 32 warps ptxas takes 32 registers for
# sm_80 and spills 36 bytes.
TILE, SCRATCH_WARPS = 2048, 16

_SCALARS = ["requests", "depth", "stride"]  # compiled once for all of their values: a step must not wait for a compiler


@triton.jit
def _survive(survival, origin, k, drafted):
    """Survival after position k: what survived before times the sanitised confidence at origin + k."""
    factor = tl.load(origin + k, mask=k < drafted, other=0.0)
    # NaN fails the comparison, so one select counts it as 0 together with negatives.
    return survival * tl.where(factor > 0.0, tl.minimum(factor, 1.0), 0.0)


@triton.jit(do_not_specialize=_SCALARS)
def allocate_kernel(
    confidence, remap, prior, budget, lens, indptr, requests, depth, stride, GAMMA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.arange(0, BLOCK)
    live = row < requests
    source = tl.load(remap + row, mask=live, other=-1)
    origin = tl.where(source >= 0, confidence + source * stride, prior)
    drafted = tl.where(live, depth, 0)
    # Floats in [0, 1] order like their bits. One vector a position, multiplied left to right: a scan over a second
    # dimension would multiply in tree order, and then survival can rise along a row by an ulp.
    survival = tl.full([BLOCK], 1.0, tl.float32)
    keys = ()
    for k in tl.static_range(GAMMA):
        survival = _survive(survival, origin, k, drafted)
        keys = keys + (survival.to(tl.int32, bitcast=True),)  # noqa: RUF005 (Triton has no starred tuples)

    # The largest key that `wanted` candidates reach, bit by bit: all keys lie below 2^30. At least 1, because a
    # survival of 0 is never chosen.
    wanted = tl.maximum(tl.load(budget), 0)
    least = 0
    for bit in range(30):
        candidate = least + (1 << (29 - bit))
        reach = tl.zeros([BLOCK], tl.int32)
        for k in tl.static_range(GAMMA):
            reach += (keys[k] >= candidate).to(tl.int32)
        least = tl.where(tl.sum(reach) >= wanted, candidate, least)
    least = tl.maximum(least, 1)

    extra = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(GAMMA):
        extra += (keys[k] > least).to(tl.int32)
    # What is left goes to candidates equal to it, by position, then request: whole positions, then a part of one.
    left = wanted - tl.sum(extra)
    part = tl.zeros([BLOCK], tl.int32)
    room = 0
    for k in tl.static_range(GAMMA):
        tie = (keys[k] == least).to(tl.int32)
        ties = tl.sum(tie)
        extra += tl.where(ties <= left, tie, 0)
        split = (left > 0) & (ties > left)
        part = tl.where(split, tie, part)
        room = tl.where(split, left, room)
        left = tl.maximum(left - ties, 0)
    extra += part * (tl.cumsum(part, 0) <= room).to(tl.int32)

    verified = tl.where(live, extra + 1, 0)
    tl.store(lens + row, verified, mask=live)
    tl.store(indptr + row + 1, tl.cumsum(verified, 0), mask=live)
    tl.store(indptr, 0)


@triton.jit(do_not_specialize=_SCALARS)
def allocate_scratch_kernel(
    confidence,
    remap,
    prior,
    budget,
    lens,
    indptr,
    keys,
    requests,
    depth,
    stride,
    GAMMA: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """allocate_kernel with the keys in memory, int32 [GAMMA, TILES * BLOCK], walked a tile at a time."""
    lane = tl.arange(0, BLOCK)
    for tile in range(TILES):
        row = tile * BLOCK + lane
        source = tl.load(remap + row, mask=row < requests, other=-1)
        origin = tl.where(source >= 0, confidence + source * stride, prior)
        drafted = tl.where(row < requests, depth, 0)
        survival = tl.full([BLOCK], 1.0, tl.float32)
        for k in tl.static_range(GAMMA):
            survival = _survive(survival, origin, k, drafted)
            tl.store(keys + k * TILES * BLOCK + row, survival.to(tl.int32, bitcast=True))
    tl.debug_barrier()  # keys are read back in another layout than they were written in

    wanted = tl.maximum(tl.load(budget), 0)
    least = 0
    for digit in range(15):  # two bits a pass: three counts cost hardly more than one, reading the keys is what costs
        step = 1 << (28 - 2 * digit)
        one = tl.zeros([BLOCK], tl.int32)
        two = tl.zeros([BLOCK], tl.int32)
        three = tl.zeros([BLOCK], tl.int32)
        for chunk in range(GAMMA * TILES):
            key = tl.load(keys + chunk * BLOCK + lane)
            one += (key >= least + step).to(tl.int32)
            two += (key >= least + 2 * step).to(tl.int32)
            three += (key >= least + 3 * step).to(tl.int32)
        digits = (tl.sum(one) >= wanted).to(tl.int32)
        digits += (tl.sum(two) >= wanted).to(tl.int32)
        digits += (tl.sum(three) >= wanted).to(tl.int32)
        least += step * digits
    least = tl.maximum(least, 1)

    more = tl.zeros([BLOCK], tl.int32)
    for chunk in range(GAMMA * TILES):
        more += (tl.load(keys + chunk * BLOCK + lane) > least).to(tl.int32)
    left = wanted - tl.sum(more)
    cut = GAMMA  # the position whose ties are taken in part
    room = 0
    for position in range(GAMMA):
        equal = tl.zeros([BLOCK], tl.int32)
        for tile in range(TILES):
            equal += (tl.load(keys + (position * TILES + tile) * BLOCK + lane) == least).to(tl.int32)
        ties = tl.sum(equal)
        split = (cut == GAMMA) & (ties > left)
        cut = tl.where(split, position, cut)
        room = tl.where(split, left, room)
        left = tl.maximum(left - ties, 0)

    taken = 0
    total = 0
    for tile in range(TILES):
        row = tile * BLOCK + lane
        extra = tl.zeros([BLOCK], tl.int32)
        part = tl.zeros([BLOCK], tl.int32)
        for k in tl.static_range(GAMMA):
            key = tl.load(keys + k * TILES * BLOCK + row)
            extra += ((key > least) | ((key == least) & (k < cut))).to(tl.int32)
            part += ((key == least) & (k == cut)).to(tl.int32)
        extra += part * (taken + tl.cumsum(part, 0) <= room).to(tl.int32)
        taken += tl.sum(part)
        verified = tl.where(row < requests, extra + 1, 0)
        tl.store(lens + row, verified, mask=row < requests)
        tl.store(indptr + row + 1, total + tl.cumsum(verified, 0), mask=row < requests)
        total += tl.sum(verified)
    tl.store(indptr, 0)


def warps(block: int, gamma: int) -> int:
    """Warps for a block of rows and padded positions: 16 keys and 4 rows a thread at most, 32 and 8 for 4096 x 4.

    That one's pointers do not fit beside the keys into the 64 registers which a thread has at 32 warps.
    """
    return 16 if block * gamma >= IN_REGISTERS and block > TILE else max(block * gamma // 512, block // 128, 1)


def allocate_triton(
    confidence: Tensor, remap: Tensor, prior: Tensor, budget: Tensor, depth: int, lens: Tensor, indptr: Tensor
) -> None:
    """Fills lens [R] and indptr [R + 1] int32 on the device; arguments as sglang_dspark.kernels.allocate.allocate."""
    requests = remap.shape[0]
    gamma = triton.next_power_of_2(confidence.shape[1])
    block = max(triton.next_power_of_2(requests), 32)
    inputs = confidence.contiguous(), remap.contiguous(), prior.contiguous(), budget, lens, indptr
    sizes = requests, depth, confidence.shape[1]
    if block * gamma <= IN_REGISTERS:
        allocate_kernel[(1,)](*inputs, *sizes, GAMMA=gamma, BLOCK=block, num_warps=warps(block, gamma))
        return
    tiles = max(block // TILE, 1)
    keys = torch.empty(gamma * tiles * TILE, dtype=torch.int32, device=confidence.device)
    allocate_scratch_kernel[(1,)](*inputs, keys, *sizes, GAMMA=gamma, TILES=tiles, BLOCK=TILE, num_warps=SCRATCH_WARPS)
