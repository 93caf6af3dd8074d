"""Files of ours: whole or not there at all, and for their owner's eyes only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """An empty file beside ``path`` to write, mode 0600; it takes the place of ``path`` once the block ends.

    Where the block raises, or the machine stops, ``path`` is what it was. Folders are made as needed.

    Raises:
        OSError: of the system, about ``path``: the file beside it is nothing that a user has heard of.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _beside(path) as temporary:
            yield temporary
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")  # mode 0600
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # content before name
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
