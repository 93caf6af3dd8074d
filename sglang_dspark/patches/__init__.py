"""Source patches that mend gaps of SGLang itself, one folder a version, and what applies, checks and reverts them."""

from sglang_dspark.patches.tree import PatchSet, applied, find_tree, open_tree

__all__ = ["PatchSet", "applied", "find_tree", "open_tree"]
