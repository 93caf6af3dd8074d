"""Every option of ours in one typed, validated place. SGLang's own flags keep their names and are not repeated here.

Options are environment variables, because SGLang's command line cannot be extended from outside, and every process of a
server inherits them. All are optional; the defaults are what a server should run with.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SUPPORTED_SGLANG = "0.5.23"
MAX_STEPS = 16  # gamma of the allocation kernel, design limit; longer EAGLE chains were never profitable anywhere
DEFAULT_STEPS = 5  # positions beyond 5 are rarely worth a draft forward; the planner drafts fewer whenever that pays
POLICY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

NAMES = (
    "DSPARK_ALLOW_SGLANG",
    "DSPARK_CONFIDENCE_HEAD",
    "DSPARK_COST_TABLE",
    "DSPARK_CPU_OVERLAP",
    "DSPARK_POLICY",
    "DSPARK_PROFILE_SECONDS",
    "DSPARK_TRACE",
)


class Refusal(SystemExit, ValueError):
    """A wrong option, in one sentence that names flag, value and remedy.

    A SystemExit, so that a command line ends with the sentence and no traceback; a ValueError, so that a program that
    builds an ``sglang.Engine`` can catch it like any other wrong argument.
    """


@dataclass(frozen=True)
class Options:
    """What the environment says. Built by :func:`read_options`, once a process."""

    profile_seconds: float | None = None
    """Time limit of the start-up profile, seconds; 0 means no profile and so verify-all. None: 10 s, or 5% of the start
    so far where that is longer (sglang_dspark.engine.step_cost.profile_limit)."""
    cost_table: Path | None = None
    """File of the step cost: read in place of the start-up profile where it is there, written after one where not."""
    head: Path | Literal["off"] | None = None
    """Confidence head, a file or a draft's folder; None: the one in the draft's folder, if any; "off": none."""
    trace: Path | None = None
    """File that steps are recorded in (sglang_dspark.observe.trace), written anew; None: nowhere."""
    trace_bytes: int = 256 << 20
    """The most that file may have: about 2.4 million records at five positions."""
    policy: str | None = None
    """``module:factory`` of a verify policy that replaces the scheduler's: for experiments and tests."""
    cpu_overlap: bool = False
    """Keep SGLang's overlap schedule on a CPU server: for tests of it, as there is no device to overlap with."""


def read_options(environ: Mapping[str, str] = os.environ) -> Options:
    """Parse and validate the ``DSPARK_*`` variables.

    Raises:
        Refusal: a value cannot be used, or a ``DSPARK_*`` variable is not an option.
    """
    for name in environ:
        if name.startswith("DSPARK_") and name not in NAMES:
            raise Refusal(f"{name}={environ[name]!r} is not an option of sglang-dspark; it has {', '.join(NAMES)}.")
    policy = environ.get("DSPARK_POLICY") or None
    if policy is not None and not POLICY.fullmatch(policy):
        raise Refusal(f"DSPARK_POLICY={policy!r} must have the form module:factory.")
    trace, trace_bytes = _trace(environ.get("DSPARK_TRACE"))
    return Options(
        profile_seconds=_seconds(environ.get("DSPARK_PROFILE_SECONDS")),
        cost_table=_cost_table(environ.get("DSPARK_COST_TABLE")),
        head=_head(environ.get("DSPARK_CONFIDENCE_HEAD")),
        trace=trace,
        trace_bytes=trace_bytes,
        policy=policy,
        cpu_overlap=_cpu_overlap(environ.get("DSPARK_CPU_OVERLAP"), environ.get("TRITON_INTERPRET")),
    )


def allowed_sglang(environ: Mapping[str, str] = os.environ) -> str | None:
    """The SGLang version of ``DSPARK_ALLOW_SGLANG``: one to run on although it is not the supported one.

    Apart from :func:`read_options`, because the plugin needs it before there is a place to refuse anything.
    """
    return environ.get("DSPARK_ALLOW_SGLANG") or None


def _path(name: str, text: str, file: str) -> Path:
    """``file``, part of the variable's ``text``, as a path that the system can look up, whether it is there or not."""
    path = Path(file)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be read, ...
        reason = getattr(error, "strerror", None) or error
        raise Refusal(f"{name}={text!r} cannot be looked up ({reason}); name another file.") from None
    return path


def _cost_table(text: str | None) -> Path | None:
    if not text:
        return None
    path = _path("DSPARK_COST_TABLE", text, text)
    if path.is_dir():
        raise Refusal(f"DSPARK_COST_TABLE={text!r} is a folder; name a file.")
    return path


def _head(text: str | None) -> Path | Literal["off"] | None:
    if not text:
        return None
    if text == "off":
        return "off"
    path = _path("DSPARK_CONFIDENCE_HEAD", text, text)
    if not path.exists():
        raise Refusal(f"DSPARK_CONFIDENCE_HEAD={text!r} is not there; name a file, a draft's folder, or off.")
    return path


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 600:  # also refuses NaN
        raise Refusal(f"DSPARK_PROFILE_SECONDS={text!r} must be a number of seconds from 0 (no profile) to 600.")
    return value


def _cpu_overlap(text: str | None, interpreter: str | None) -> bool:
    if text not in (None, "", "0", "1"):
        raise Refusal(f"DSPARK_CPU_OVERLAP={text!r} must be 0 or 1.")
    if text == "1" and interpreter != "1":
        raise Refusal(
            "DSPARK_CPU_OVERLAP='1' needs TRITON_INTERPRET=1, because a Triton kernel of SGLang carries drafts from "
            "step to step; set it as well, or leave DSPARK_CPU_OVERLAP out."
        )
    return text == "1"


def _trace(text: str | None) -> tuple[Path | None, int]:
    """FILE or FILE:MEGABYTES."""
    if not text:
        return None, Options.trace_bytes
    file, colon, megabytes = text.rpartition(":")
    if not colon:
        file, megabytes = text, str(Options.trace_bytes >> 20)
    if not (re.fullmatch("[0-9]{1,7}", megabytes) and 1 <= int(megabytes) <= 1 << 20):
        raise Refusal(f"DSPARK_TRACE={text!r} must be FILE or FILE:MEGABYTES, from 1 to 1048576 megabytes.")
    path = _path("DSPARK_TRACE", text, file)
    if path.is_dir() or not path.parent.is_dir():
        raise Refusal(f"DSPARK_TRACE={text!r} must name a file in a folder that exists.")
    return path, int(megabytes) << 20
