"""A small, strict reader of unified diffs: text in, text out, and no fuzz.

A hunk fits where its old lines stand exactly once in the file. Where that is may have moved, by another patch of the
same file; what stands there may not differ by a space. Only changes of existing files are known, which is all that our
patches do: a file that is created would stay behind when pip removes the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

ROOT = "python/sglang/"  # of the paths in a diff against SGLang's repository
HEADER = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*")


class State(str, Enum):
    """Of a hunk, a file or a patch in a tree."""

    IN = "in"
    OUT = "out"
    CHANGED = "changed"
    """Neither: the source is another one there, or only a part of the patch is in."""


class Hunk(NamedTuple):
    old: str
    new: str

    def state(self, text: str) -> State:
        """Whether the new or the old lines stand in ``text``, exactly once."""
        # The longer block first: at the end of a file one may begin with the other.
        blocks = sorted(((State.IN, self.new), (State.OUT, self.old)), key=lambda block: -len(block[1]))
        for state, lines in blocks:
            found = len(re.findall(f"^(?={re.escape(lines)})", text, re.MULTILINE))
            if found:
                return state if found == 1 else State.CHANGED
        return State.CHANGED


class FileDiff(NamedTuple):
    path: str
    """Relative to the package's folder."""
    hunks: tuple[Hunk, ...]

    def state(self, text: str) -> State:
        return common(hunk.state(text) for hunk in self.hunks)

    def turned(self, text: str, to: State) -> str:
        """``text``, in which this diff is out or in, with it turned ``to`` IN or OUT."""
        for hunk in self.hunks:
            old, new = (hunk.old, hunk.new) if to is State.IN else (hunk.new, hunk.old)
            at = re.search(f"^{re.escape(old)}", text, re.MULTILINE)
            text = text if at is None else text[: at.start()] + new + text[at.end() :]
        return text


class Patch(NamedTuple):
    name: str
    reason: str
    files: tuple[FileDiff, ...]


def common(states: Iterable[State]) -> State:
    """The one state that all have; CHANGED where they differ."""
    found = set(states)
    return found.pop() if len(found) == 1 else State.CHANGED


def parse(name: str, text: str) -> Patch:
    """Reads a patch: its reason in plain words, then a unified diff.

    Raises:
        ValueError: it is damaged, or does more than change files under ROOT.
    """
    lines = text.splitlines(keepends=True)
    start = next((at for at, line in enumerate(lines) if line.startswith("--- ")), len(lines))
    files, at = [], start
    while at < len(lines):
        path = _path(name, lines, at)
        hunks, at = _hunks(name, lines, at + 2)
        files.append(FileDiff(path, hunks))
    if not files:
        raise ValueError(f"Patch {name} changes nothing; install sglang-dspark again.")
    return Patch(name, " ".join("".join(lines[:start]).split()), tuple(files))


def _path(name: str, lines: list[str], at: int) -> str:
    old, new = (line.rstrip("\n") for line in (lines[at], *lines[at + 1 : at + 2], "")[:2])
    path = old.removeprefix(f"--- a/{ROOT}")
    if path == old or new != f"+++ b/{ROOT}{path}" or ".." in path.split("/"):
        raise ValueError(f"Patch {name} is damaged at line {at + 1}; install sglang-dspark again.")
    return path


def _hunks(name: str, lines: list[str], at: int) -> tuple[tuple[Hunk, ...], int]:
    hunks = []
    while at < len(lines) and (header := HEADER.match(lines[at])):
        end = at + 1
        while end < len(lines) and lines[end][0] in " +-" and not lines[end].startswith("--- "):
            end += 1
        old, new = ([line[1:] for line in lines[at + 1 : end] if line[0] in kept] for kept in (" -", " +"))
        if [len(old), len(new)] != [int(count or 1) for count in header.groups()]:
            raise ValueError(f"Patch {name} is damaged at line {at + 1}; install sglang-dspark again.")
        hunks.append(Hunk("".join(old), "".join(new)))
        at = end
    if not hunks:
        raise ValueError(f"Patch {name} is damaged at line {at + 1}; install sglang-dspark again.")
    return tuple(hunks), at
