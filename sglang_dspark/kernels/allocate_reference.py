"""Plain torch reference of the allocation: exact top-B of survival by sorting. Other paths must equal it to the bit."""

import torch
from torch import Tensor


def survival_rows(confidence: Tensor, remap: Tensor, prior: Tensor, depth: int) -> Tensor:
    """Survival [R, depth] float32: sanitised confidence (the prior where remap is -1), multiplied left to right."""
    table = torch.cat([confidence, prior[None]]).to(torch.float32)
    rows = table[torch.where(remap < 0, len(confidence), remap)][:, :depth]
    rows = torch.where(rows > 0, rows.clamp(max=1.0), 0.0)
    for position in range(1, rows.shape[1]):
        rows[:, position] *= rows[:, position - 1]
    return rows


def allocate_reference(
    confidence: Tensor, remap: Tensor, prior: Tensor, budget: Tensor, *, depth: int | None = None
) -> tuple[Tensor, Tensor]:
    """verify_lens [R] int32 and qo_indptr [R + 1] int32; arguments as sglang_dspark.kernels.allocate.allocate."""
    survival = survival_rows(confidence, remap, prior, confidence.shape[1] if depth is None else depth)
    requests = len(survival)
    # Position-major order with a stable sort is the tie rule (position, request) by itself.
    values = survival.t().reshape(-1)
    order = torch.argsort(values, descending=True, stable=True)[: max(int(budget), 0)]
    chosen = order[values[order] > 0]
    lens = 1 + torch.bincount(chosen % max(requests, 1), minlength=requests)
    indptr = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
    return lens.to(torch.int32), indptr.to(torch.int32)
