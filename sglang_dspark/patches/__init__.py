"""Source patches that mend gaps of SGLang itself, one folder a version, and what applies, checks and reverts them."""

from sglang_dspark.patches.diff import State
from sglang_dspark.patches.tree import PatchSet, find_tree, open_tree, states_of_installed

__all__ = ["PatchSet", "State", "find_tree", "open_tree", "states_of_installed"]
