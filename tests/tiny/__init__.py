"""Tiny targets and drafts that stock SGLang loads as they are, trained in seconds, for tests of speculative decoding.

`build()` makes them once for one state of this package's source and returns their folders: `build().target`, ....
"""

from tests.tiny.build import TinyPairs, build

__all__ = ["TinyPairs", "build"]
