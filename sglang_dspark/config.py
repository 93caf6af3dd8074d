"""Every option of ours in one typed, validated place. SGLang's own flags keep their names and are not repeated here.

Options are environment variables, because SGLang's command line cannot be extended from outside, and every process of a
server inherits them. All are optional; the defaults are what a server should run with.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

SUPPORTED_SGLANG = "0.5.23"
MAX_STEPS = 16  # gamma of the allocation kernel, design limit; longer EAGLE chains were never profitable anywhere
DEFAULT_STEPS = 5  # positions beyond 5 are rarely worth a draft forward; the planner drafts fewer whenever that pays


class Refusal(SystemExit, ValueError):
    """A wrong option, in one sentence that names flag, value and remedy.

    A SystemExit, so that a command line ends with the sentence and no traceback; a ValueError, so that a program that
    builds an ``sglang.Engine`` can catch it like any other wrong argument.
    """


@dataclass(frozen=True)
class Options:
    """What the environment says. Built by :func:`read_options`, once a process."""

    profile_seconds: float = 10.0
    """Time limit of the start-up profile, seconds; 0 means no profile and so verify-all."""
    policy: str | None = None
    """``module:factory`` of a verify policy that replaces the scheduler's: for experiments and tests."""


def read_options(environ: Mapping[str, str] = os.environ) -> Options:
    """Parse and validate the ``DSPARK_*`` variables.

    Raises:
        Refusal: a value cannot be used, or a ``DSPARK_*`` variable is not an option.
    """
    known = {"DSPARK_PROFILE_SECONDS", "DSPARK_POLICY", "DSPARK_ALLOW_SGLANG"}
    for name in environ:
        if name.startswith("DSPARK_") and name not in known:
            raise Refusal(
                f"{name}={environ[name]!r} is not an option of sglang-dspark; it has {', '.join(sorted(known))}."
            )
    policy = environ.get("DSPARK_POLICY") or None
    if policy is not None and policy.count(":") != 1:
        raise Refusal(f"DSPARK_POLICY={policy!r} must have the form module:factory.")
    return Options(
        profile_seconds=_seconds(environ.get("DSPARK_PROFILE_SECONDS")),
        policy=policy,
    )


def allowed_sglang(environ: Mapping[str, str] = os.environ) -> str | None:
    """The SGLang version of ``DSPARK_ALLOW_SGLANG``: one to run on although it is not the supported one.

    Apart from :func:`read_options`, because the plugin needs it before there is a place to refuse anything.
    """
    return environ.get("DSPARK_ALLOW_SGLANG") or None


def _seconds(text: str | None) -> float:
    if not text:
        return Options.profile_seconds
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 600:  # also refuses NaN
        raise Refusal(f"DSPARK_PROFILE_SECONDS={text!r} must be a number of seconds from 0 (no profile) to 600.")
    return value
