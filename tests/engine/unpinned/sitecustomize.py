"""In a server that has this folder on PYTHONPATH: pinned memory is plain memory.

SGLang's LoRA asks for pinned memory whatever the device, which torch has only where there is an accelerator.
"""

import torch


def _unpinned(make):
    return lambda *args, pin_memory=False, **options: make(*args, **options)


for _name in ("tensor", "empty", "zeros", "arange"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor
