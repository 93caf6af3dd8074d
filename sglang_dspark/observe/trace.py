"""The step trace: one fixed-size record for each request of each step, in a bounded file without any text of anybody.

The file is one line of JSON and then records. The line has ``format``, ``gamma`` (positions of a record), ``features``
(names of what is kept of each position), ``rules`` (names of the verify rules) and ``limit`` (bytes the file may have).
A record is little-endian and packed, :func:`record_type`:

| field | type | meaning |
|---|---|---|
| step | u4 | number of the step, from 1; the records of a step are in batch order |
| request | u8 | the same in all records of one request, and of no other |
| rule | u1 | verify rule, index into ``rules`` |
| clean | u1 | 1 where the request counts in pooled statistics (no grammar, penalties or logit bias) |
| depth | u1 | draft positions in the step |
| verified, accepted | u1 | draft tokens the target saw, and accepted; anchor and bonus excluded |
| budget | u4 | draft tokens that the plan verifies in the step, all requests together |
| tokens | u4 | tokens the target forward was given in the step |
| kv_tokens | u4 | context of all requests of the step, tokens |
| seconds | f4 | time of the step; NaN where the host does not see it end |
| recent | f4 | recent acceptance of the request when the step was scheduled, confidence.RecentAcceptance |
| shown | f4 [gamma, features] | what the draft showed before it drew each position; NaN past the depth |
| confidence | f4 [gamma] | P(position accepted given all before accepted) that the step went by; 0 past the depth |
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

FORMAT = "sglang-dspark-trace/1"
LONGEST_HEADER = 4096  # bytes of the first line; anything longer is no trace of ours
MOST_POSITIONS = 255  # of a record: what a u1 counts


def record_type(gamma: int, features: int) -> np.dtype[Any]:
    """The packed little-endian layout of a record."""
    return np.dtype(
        [("step", "<u4"), ("request", "<u8")]
        + [(name, "u1") for name in ("rule", "clean", "depth", "verified", "accepted")]
        + [(name, "<u4") for name in ("budget", "tokens", "kv_tokens")]
        + [("seconds", "<f4"), ("recent", "<f4"), ("shown", "<f4", (gamma, features)), ("confidence", "<f4", (gamma,))]
    )


class TraceWriter:
    """Writes a trace of at most ``limit`` bytes, whole steps only; what comes after is dropped, and said once.

    Readable by the owner only. Not buffered: a server is ended by a signal, and one write a step takes microseconds.

    Raises:
        OSError: the file cannot be written, or another process is writing it (data-parallel replicas share one name).
    """

    def __init__(self, path: Path, gamma: int, features: Sequence[str], rules: Sequence[str], limit: int) -> None:
        self.path = path
        self.type = record_type(gamma, len(features))
        header = {"format": FORMAT, "gamma": gamma, "features": list(features), "rules": list(rules), "limit": limit}
        line = json.dumps(header).encode() + b"\n"
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.truncate(0)
        os.fchmod(self._file.fileno(), 0o600)  # of a file that was there with another mode
        self._file.write(line)
        self._size, self._left = len(line), limit - len(line)

    def write(self, requests: int, **fields: Any) -> None:
        """Adds the records of a step of R requests: a scalar or [R, ...] array for each field of the record."""
        records = np.zeros(requests, self.type)
        for name in self.type.names or ():
            records[name] = fields[name]
        if records.nbytes > self._left:
            self._stop("is full")
            return
        try:
            if self._file.write(records.tobytes()) != records.nbytes:  # what still fitted on a disk that is now full
                self._file.truncate(self._size)
                self._stop("cannot be written (the disk is full)")
                return
            self._size += records.nbytes
            self._left -= records.nbytes
        except OSError as error:  # a full disk must not keep the server from learning
            self._stop(f"cannot be written ({error})")

    def _stop(self, why: str) -> None:
        if self._left:
            logger.warning("DSPARK: the trace %s %s; further steps are not recorded.", self.path, why)
        self._left = 0

    def close(self) -> None:
        self._file.close()


class Trace(NamedTuple):
    """A trace that was read."""

    gamma: int
    features: tuple[str, ...]
    rules: tuple[str, ...]
    records: NDArray[Any]
    """[n] of :func:`record_type`, in the order written."""


def read_trace(path: Path) -> Trace:
    """Reads a trace; a record that was cut short at the end, by a server that was killed, is left out.

    Raises:
        ValueError: the file is not a trace of this format.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        line = file.readline(LONGEST_HEADER)
        try:
            header = json.loads(line)
            gamma, features, rules = int(header["gamma"]), tuple(header["features"]), tuple(header["rules"])
            right = header["format"] == FORMAT and 0 < gamma <= MOST_POSITIONS
            right = right and all(isinstance(name, str) for name in features + rules)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            right = False
        if not right:
            raise ValueError(f"{path} is not a trace of format {FORMAT}; write one with DSPARK_TRACE=FILE.")
        content = file.read()
    layout = record_type(gamma, len(features))
    records = np.frombuffer(content, layout, len(content) // layout.itemsize)
    wrong = (
        (records["rule"] >= len(rules))
        | (records["depth"] > gamma)
        | (records["verified"] > records["depth"])
        | (records["accepted"] > records["verified"])
    )
    if wrong.any():
        raise ValueError(f"{path} is damaged: record {int(wrong.argmax())} contradicts itself; write another trace.")
    return Trace(gamma, features, rules, records)
