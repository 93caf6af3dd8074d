"""Brings what a step leaves on the device to the host, without making either wait for the other."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """Device tensors on their way to the host, for a reader that comes later.

    The copies stand in the stream's order, so the tensors may be overwritten by what is launched after. Each has pinned
    memory of its own, which torch keeps and hands out again: as much is in use as there are steps in flight, two under
    SGLang's overlap schedule. CPU tensors are copied at once.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [_send(tensor) for tensor in tensors]
        devices = [tensor.device for tensor in tensors if not tensor.is_cpu]
        self._sent = torch.get_device_module(devices[0]).Event() if devices else None
        if self._sent is not None:
            self._sent.record()

    def read(self) -> list[NDArray[np.generic]]:
        """The tensors as they were. Waits for the copies, not for what was launched after them."""
        if self._sent is not None:
            self._sent.synchronize()
        return [copy.numpy() for copy in self._copies]


def _send(tensor: Tensor) -> Tensor:
    if tensor.is_cpu:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
