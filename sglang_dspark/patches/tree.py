"""Our patches on an SGLang tree: which are in, and all of them applied or reverted, or nothing touched."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from sglang_dspark.patches.diff import Patch, State, common, parse

HERE = Path(__file__).parent
VERSION = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


class PatchSet:
    """The patches for a tree's SGLang version, and their states in it."""

    def __init__(self, tree: Path, patches: Iterable[Patch]) -> None:
        self.tree, self.patches = tree, tuple(patches)

    def states(self) -> dict[str, State]:
        """State of each patch by name, in order. Reads the files that the patches change."""
        texts = self._texts()
        return {patch.name: self._state(patch, texts) for patch in self.patches}

    def apply(self) -> list[str]:
        """Puts in every patch that is out. Returns their names.

        Raises:
            ValueError: a patch does not fit, or a file cannot be written; nothing was changed then.
        """
        return self._turn(State.IN)

    def revert(self) -> list[str]:
        """Takes out every patch that is in. Returns and raises as :meth:`apply`."""
        return self._turn(State.OUT)

    def _turn(self, to: State) -> list[str]:
        texts = self._texts()
        before, done = dict(texts), []
        for patch in self.patches:
            state = self._state(patch, texts)
            if state is State.CHANGED:
                raise ValueError(f"{self._misfit(patch, texts)} Nothing was changed.")
            if state is to:
                continue
            for file in patch.files:
                texts[file.path] = file.turned(texts[file.path], to)
            if self._state(patch, texts) is not to:
                raise ValueError(f"Patch {patch.name} overlaps another one in {self.tree}; nothing was changed.")
            done.append(patch.name)
        changed = {self.tree / path: text for path, text in texts.items() if text != before[path]}
        _replace_all(changed, {path: before[str(path.relative_to(self.tree))] for path in changed})
        return done

    def _misfit(self, patch: Patch, texts: Mapping[str, str]) -> str:
        """Where and how a patch does not fit, in a sentence."""
        states = {file.path: file.state(texts[file.path]) for file in patch.files}
        found = {hunk.state(texts[file.path]) for file in patch.files for hunk in file.hunks}
        if found == {State.IN, State.OUT}:
            return f"Patch {patch.name} is only half in {self.tree}; install that SGLang again."
        path = next(path for path, state in states.items() if state is State.CHANGED)
        return f"Patch {patch.name} does not fit {self.tree / path}, which is not the released file."

    def _state(self, patch: Patch, texts: Mapping[str, str]) -> State:
        return common(file.state(texts[file.path]) for file in patch.files)

    def _texts(self) -> dict[str, str]:
        paths = {file.path for patch in self.patches for file in patch.files}
        try:
            # Bytes, so that line endings stay what they are.
            return {path: (self.tree / path).read_bytes().decode() for path in sorted(paths)}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.tree} cannot be read as SGLang's source ({error}); nothing was changed.") from None


def open_tree(tree: Path) -> PatchSet:
    """The patches for the SGLang in ``tree``.

    Raises:
        ValueError: it does not say its version, or there are no patches for it.
    """
    try:
        stated = VERSION.search((tree / "_version.py").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        stated = None
    if stated is None:
        raise ValueError(f"{tree} has no _version.py that says which SGLang it is; name an installed one with --tree.")
    folder = HERE / f"sglang-{stated[1]}"
    if not folder.is_dir():
        known = ", ".join(sorted(path.name.removeprefix("sglang-") for path in HERE.glob("sglang-*")))
        raise ValueError(f"{tree} is SGLang {stated[1]}, and there are patches for {known} only; nothing was changed.")
    return PatchSet(
        tree, (parse(file.stem, file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.patch")))
    )


def find_tree(path: Path | None) -> Path:
    """SGLang's folder in ``path``: itself, what it was installed into, or the repository. None: the one installed here.

    Raises:
        ValueError: there is no SGLang.
    """
    if path is None:
        spec = importlib.util.find_spec("sglang")  # finds it without running it
        if spec is None or spec.origin is None:
            raise ValueError("SGLang is not installed here; name its folder with --tree.")
        return Path(spec.origin).parent
    for folder in (path, path / "sglang", path / "python" / "sglang"):
        if (folder / "srt").is_dir():
            return folder
    raise ValueError(f"--tree {path} holds no SGLang; name the folder that it was installed into.")


def states_of_installed() -> dict[str, State]:
    """State of each patch in the installed SGLang; empty where there are no patches for this version."""
    try:
        return open_tree(find_tree(None)).states()
    except ValueError:
        return {}


def _replace_all(after: Mapping[Path, str], before: Mapping[Path, str]) -> None:
    """Writes every file beside its place, then moves all into place; what fails half-way is moved back.

    Moved and not written over: installers link one file into many environments.
    """
    staged: dict[Path, Path] = {}
    moved: list[Path] = []
    try:
        for path, text in after.items():
            staged[path] = _beside(path, text)
        for path, new in staged.items():
            os.replace(new, path)
            moved.append(path)
    except OSError as error:
        for path in moved:
            os.replace(_beside(path, before[path]), path)
        raise ValueError(f"{error.filename or 'A file'} cannot be written ({error}); nothing was changed.") from None
    finally:
        for new in staged.values():
            with suppress(OSError):
                new.unlink()


def _beside(path: Path, text: str) -> Path:
    """A new file in the same folder with the text and the mode of ``path``."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            file.write(text.encode())
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
