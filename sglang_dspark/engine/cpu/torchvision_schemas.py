"""Lets PyPI's torchvision import beside a CPU build of torch.

PyPI's torchvision is built for CUDA. Its compiled half does not load beside a CPU torch, torchvision tolerates that,
and then registers shape functions for two operators the missing half would have defined, which fails the import (and
with it transformers' and SGLang's). Declaring the two operators is enough; calling them still fails.
"""

import importlib.util
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # a library's definitions live as long as the object


def define_if_missing() -> bool:
    """Declare torchvision's `nms` and `qnms` if its compiled half cannot load. Returns True if it declared them."""
    global _library
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _library is not None or hasattr(torch.ops.torchvision, "nms"):
        return False
    try:
        torch.ops.load_library(Path(spec.origin).parent / "_C.so")
    except OSError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            _library.define(schema)
        return True
    return False
