"""Device operations of a step, each with a torch reference in its own file."""

from sglang_dspark.kernels.allocate import Allocation, allocate

__all__ = ["Allocation", "allocate"]
