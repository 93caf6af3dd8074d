"""Copies KV rows between slots in every layer's buffer, given only the buffers' addresses."""

import ctypes

import torch
from torch import Tensor


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """For every buffer: row[tgt_loc] = row[src_loc], all reads before the writes, so overlapping lists are safe.

    data_ptrs: addresses of the buffers [layers * 2] uint64; strides: bytes per row of each; tgt_loc, src_loc [n] int.
    Source: SGLang 0.5.23, kernels/ops/kvcache/cache_move.py.
    """
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.long(), src_loc.long()
    rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[target] = buffer[source]
