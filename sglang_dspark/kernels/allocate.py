"""Splits the verify budget over the requests: exact top-B of survival, ties by (position, request)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dspark.kernels.allocate_cpu import allocate_cpu, gather, in_order

# Rows and positions the kernel is made for: 4096 requests in a batch, 16 drafted positions.
MAX_REQUESTS, MAX_GAMMA = 4096, 16


class Allocation(NamedTuple):
    """How many tokens each request sends to the target, and where its rows start."""

    verify_lens: Tensor  # [R] int32, 1 + draft tokens verified
    qo_indptr: Tensor  # [R + 1] int32, exclusive prefix sum of verify_lens


def allocate(
    confidence: Tensor,
    remap: Tensor,
    prior: Tensor,
    budget: Tensor | int,
    *,
    depth: int | None = None,
    out: Allocation | None = None,
) -> Allocation:
    """Verifies the `budget` draft tokens most likely to survive, all requests together.

    confidence: [H, gamma] float32 of the newest draft. remap: [R] int64, the row of each request in it, -1 for none.
    prior: [gamma] float32, counted for those. budget: scalar int32 on the same device, or for CPU tensors an int; above
    what exists it verifies all. depth: only the first positions were drafted (all by default). out: filled instead of
    new tensors.

    NaN, negative and above-1 confidence count as 0, 0 and 1; a survival of 0 is never chosen. Survival never rises
    along a row, so what is chosen of a row is a prefix. On a GPU it is one launch that reads nothing back and has no
    shape that depends on data: it can be captured into a CUDA graph (give `out`). Raises ValueError for other shapes or
    types.
    """
    requests, gamma = remap.shape[0], confidence.shape[1]
    depth = gamma if depth is None else depth
    if confidence.dtype != torch.float32 or prior.dtype != torch.float32 or remap.dtype != torch.int64:
        raise ValueError(
            "allocate needs float32 confidence and prior and int64 remap, "
            f"got {confidence.dtype}, {prior.dtype}, {remap.dtype}."
        )
    if prior.shape[0] != gamma or not 0 <= depth <= gamma or gamma > MAX_GAMMA or requests > MAX_REQUESTS:
        raise ValueError(
            f"allocate takes up to {MAX_REQUESTS} requests and {MAX_GAMMA} positions, a prior for each position and a "
            f"depth within them; got {requests} requests, {gamma} positions, prior {len(prior)}, depth {depth}."
        )
    if confidence.is_cpu:
        rows, own = confidence.numpy(), remap.numpy()
        if not in_order(own, len(rows)):
            rows = gather(rows, own, prior.numpy())
        lens, indptr = allocate_cpu(rows[:, :depth], int(budget))
        made = Allocation(torch.from_numpy(lens), torch.from_numpy(indptr))
        if out is None:
            return made
        out.verify_lens.copy_(made.verify_lens)
        out.qo_indptr.copy_(made.qo_indptr)
        return out
    if isinstance(budget, int):
        raise ValueError("allocate on a GPU needs the budget there, as a scalar int32 tensor, not an int.")
    if out is None:
        out = Allocation(
            torch.empty(requests, dtype=torch.int32, device=confidence.device),
            torch.empty(requests + 1, dtype=torch.int32, device=confidence.device),
        )
    # Triton is there wherever there is a GPU, and not everywhere else.
    from sglang_dspark.kernels.allocate_triton import allocate_triton

    allocate_triton(confidence, remap, prior, budget, depth, out.verify_lens, out.qo_indptr)
    return out
