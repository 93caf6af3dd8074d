"""Splits the verify budget over the requests: exact top-B of survival, ties by (position, request)."""

from typing import NamedTuple

from torch import Tensor

from sglang_dspark.kernels.allocate_reference import allocate_reference


class Allocation(NamedTuple):
    """How many tokens each request sends to the target, and where its rows start."""

    verify_lens: Tensor  # [R] int32, 1 + draft tokens verified
    qo_indptr: Tensor  # [R + 1] int32, exclusive prefix sum of verify_lens


def allocate(
    confidence: Tensor,
    remap: Tensor,
    prior: Tensor,
    budget: Tensor,
    *,
    depth: int | None = None,
    out: Allocation | None = None,
) -> Allocation:
    """Verifies the `budget` draft tokens most likely to survive, all requests together.

    confidence: [H, gamma] float32 of the newest draft. remap: [R] int64, the row of each request in it, -1 if it has none.
    prior: [gamma] float32, counted for those. budget: scalar int32 on the same device; above what exists it verifies all.
    depth: only the first positions were drafted. out: written in place, for CUDA graphs.
    """
    lens, indptr = allocate_reference(confidence, remap, prior, budget, depth=depth)
    if out is None:
        return Allocation(lens, indptr)
    out.verify_lens.copy_(lens)
    out.qo_indptr.copy_(indptr)
    return out
