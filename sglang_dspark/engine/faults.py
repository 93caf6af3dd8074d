"""Nothing of ours stops a request: a fault in planning or bookkeeping is counted, logged once, and made up for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Faults:
    """Counts faults by the part they came from."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.watch: Callable[[str], None] | None = None
        """Told the part of every fault."""

    def run(self, part: str, action: Callable[[], T], fallback: Callable[[], T]) -> T:
        """``action()``, or ``fallback()`` where it raises. The first fault of a part is logged with its traceback."""
        try:
            return action()
        except Exception:
            self.counts[part] += 1
            if self.watch is not None and part != "metrics":
                with suppress(Exception):
                    self.watch(part)
            if self.counts[part] == 1:
                logger.exception("DSPARK: %s failed; falling back, and counting further faults silently.", part)
            return fallback()
