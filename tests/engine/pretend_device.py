"""A device that is not there: tensors marked as on it, and an exception wherever a real one would stop the host.

On a GPU the host runs ahead of its stream; whatever needs a value of a device tensor waits for all that was launched
before. ``Watch`` runs everything on the CPU, but says of marked tensors that they are on ``DEVICE``, and raises
``Waited`` for every such need, and for copies that are not from or to pinned memory or not asynchronous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)

READS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "equal", "allclose",
    "is_nonzero", "bincount",
    "__bool__", "__int__", "__float__", "__index__", "__array__", "__iter__", "__contains__", "__format__",
}  # fmt: skip


class Waited(BaseException):
    """The host would have waited. No Exception, so that no fallback of ours can swallow it."""


class OnDevice(Tensor):
    """A tensor that counts as on ``DEVICE``."""


class Pinned(Tensor):
    """A host tensor that counts as pinned."""


class Event:
    """An event of the device's only stream. Waiting for it is right once the device is known to have passed it."""

    recorded = 0
    passed = 0
    """How many of the recorded ones the device has passed."""

    def record(self) -> None:
        Event.recorded += 1
        self._number = Event.recorded

    def synchronize(self) -> None:
        if self._number > Event.passed:
            raise Waited("event.synchronize")


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


def plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, OnDevice | Pinned) else value


class Watch(TorchFunctionMode):
    """While it is entered, torch's calls are watched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for kind in types:
            if not issubclass(kind, Tensor):  # something of ours that answers for a tensor
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = _name(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marked = any(isinstance(tensor, OnDevice) for tensor in tensors)
        if name in ("is_cpu", "is_cuda", "device") and marked:
            return {"is_cpu": False, "is_cuda": True, "device": DEVICE}[name]
        if name == "pin_memory":
            return plain(args[0]).as_subclass(Pinned)
        if name == "to" and _device(args[1:], kwargs) is not None:
            return self._move(args, kwargs)
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if marked:
            self._refuse(name, args, kwargs, tensors)
        made = kwargs.get("device") is not None and torch.device(kwargs["device"]) == DEVICE
        if made:
            if name in ("tensor", "as_tensor"):
                raise Waited(f"torch.{name} on the device")
            kwargs.pop("device")
        pinned = bool(kwargs.pop("pin_memory", False))
        done = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        if name.endswith("_") and not name.endswith("__"):
            return args[0]
        if marked or made:
            return tree_map(lambda x: on_device(x) if isinstance(x, Tensor) else x, done)
        return done.as_subclass(Pinned) if pinned else done

    def _refuse(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        if name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            raise Waited(name)
        if name in ("__getitem__", "__setitem__"):
            index = tree_leaves(args[1])
            if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index):
                raise Waited(f"{name} by a mask")
        if any(not isinstance(tensor, OnDevice) and tensor.dim() for tensor in tensors):
            raise Waited(f"{name} of a device tensor and one that has to be copied there")

    def _move(self, args: Any, kwargs: dict[str, Any]) -> Tensor:
        tensor, device = args[0], _device(args[1:], kwargs)
        here = DEVICE if isinstance(tensor, OnDevice) else torch.device("cpu")
        if device != here and not (isinstance(tensor, Pinned) and kwargs.get("non_blocking")):
            raise Waited(f"to({device}) of what is not pinned, or blocking")
        return on_device(plain(tensor).clone()) if device == DEVICE else tensor

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        crosses = isinstance(target, OnDevice) != isinstance(source, OnDevice)
        host = source if isinstance(target, OnDevice) else target
        if crosses and not (isinstance(host, Pinned) and non_blocking):
            raise Waited("copy_ of what is not pinned, or blocking")
        plain(target).copy_(plain(source))
        return target


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _device(args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    for value in (*args, kwargs.get("device")):
        if isinstance(value, torch.device | str):
            return torch.device(value)
    return None
