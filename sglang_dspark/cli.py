"""The `sglang-dspark` command: one subcommand a job, each parsed here and done by the module that owns it."""

from __future__ import annotations

import argparse
import sys

from sglang_dspark import __version__
from sglang_dspark.commands.calibrate import add_calibrate
from sglang_dspark.commands.patch import add_patch
from sglang_dspark.commands.profile import add_profile
from sglang_dspark.commands.train import add_train

# Each adds its parser and sets `run` on it; imports of the work stay inside `run`, so that --help is instant.
SUBCOMMANDS = (add_train, add_profile, add_calibrate, add_patch)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dspark", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in SUBCOMMANDS:
        add(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 refused with one sentence on stderr, 2 wrong usage (argparse)."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, OSError) as error:
        print(f"sglang-dspark {args.command}: {sentence(error)}", file=sys.stderr)
        return 1


def sentence(error: Exception) -> str:
    """An error on one line. The system's own name a file, and not what to do; those of libraries run over lines."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        file = error.filename if error.filename2 is None else error.filename2
        return f"{file} cannot be used ({error.strerror}); name another path or change what is there."
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
