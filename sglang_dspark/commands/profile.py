"""`sglang-dspark profile`: the step cost of a server, measured for as long as wanted, in a file that servers read."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dspark.cost import CostTable

LONGEST = 600  # seconds of measuring that DSPARK_PROFILE_SECONDS allows


def add_profile(commands: Any) -> Callable[[argparse.Namespace], int]:
    """`profile`: from server flags to a cost table."""
    parser = commands.add_parser(
        "profile",
        help="measure the step cost of a server into a file",
        description="Starts the server that the flags describe, lets it measure itself, and ends it. Servers with the "
        "same model, device and settings read the file with DSPARK_COST_TABLE=FILE in place of their own profile.",
        usage="sglang-dspark profile --out FILE [--seconds S] [--json] -- --model-path TARGET "
        "--speculative-draft-model-path DRAFT ...",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest time to measure (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the table as one JSON object")
    parser.add_argument("flags", nargs="+", help="flags of sglang.launch_server, behind --")

    def run(args: argparse.Namespace) -> int:
        from sglang_dspark.cost import read_table

        if args.out.exists():
            raise ValueError(f"--out {args.out} is there already; delete it or name another file.")
        if not 0 < args.seconds <= LONGEST:
            raise ValueError(f"--seconds {args.seconds} must be above 0 and at most {LONGEST}.")
        code = measure(args.flags, args.out, args.seconds)
        if code:
            return code
        key, table = read_table(args.out)
        if args.json:
            print(json.dumps({"out": str(args.out), "key": key, "table": table.summary()}))
        else:
            show(table)
        return 0

    parser.set_defaults(run=run)
    return run


def measure(flags: list[str], out: Path, seconds: float) -> int:
    """Run a server until it has written `out`; 0, or the exit code of a server that ended without it."""
    if "--speculative-algorithm" not in flags:
        flags = [*flags, "--speculative-algorithm", "DSPARK"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", *flags, "--port", str(port), "--skip-server-warmup"]
    environment = {**os.environ, "DSPARK_COST_TABLE": str(out.absolute()), "DSPARK_PROFILE_SECONDS": str(seconds)}
    # What it logs is progress, and goes where a person sees it; stdout is for the result.
    server = subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        while not out.exists():  # written whole or not at all
            if server.poll() is not None:
                return server.returncode or 1
            time.sleep(0.2)
        return 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def show(table: CostTable) -> None:
    """The table as a person reads it."""
    from rich.console import Console
    from rich.table import Table

    view = Table(title="target forward")
    view.add_column("tokens", justify="right")
    view.add_column("ms", justify="right")
    for tokens, seconds in zip(table.tokens, table.seconds, strict=True):
        view.add_row(str(tokens), f"{1e3 * seconds:.2f}")
    console = Console()
    console.print(view)
    terms = table.summary()
    console.print(f"+ {terms['ms_per_request']} ms a request, {terms['ms_per_1k_context']} ms a 1k context tokens")
    console.print(f"draft: {terms['draft_ms']} ms (start, a forward, a request)")
    console.print(f"extend: {terms['extend_ms']} ms (fixed, a request, a token)")
