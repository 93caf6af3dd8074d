"""Stand-in for sgl_kernel.speculative."""

from sglang_dspark.engine.cpu.tree import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
