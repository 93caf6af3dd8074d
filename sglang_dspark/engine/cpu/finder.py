"""Finds the stand-in package when nothing else on the path answers to `sgl_kernel`."""

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

STAND_IN = Path(__file__).parent / "sgl_kernel"


class StandInFinder(MetaPathFinder):
    """Answers for the top-level name only; submodules are found through the package's own path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "sgl_kernel":
            return None
        return spec_from_file_location(fullname, STAND_IN / "__init__.py", submodule_search_locations=[str(STAND_IN)])
