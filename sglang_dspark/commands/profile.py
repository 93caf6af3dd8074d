"""`sglang-dspark profile`: the step cost of a server, measured for as long as wanted, in a file that servers read."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from sglang_dspark.cost import CostTable

HERE = "127.0.0.1"
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
        check_algorithm(args.flags)
        check_writable(args.out)
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


def check_algorithm(flags: list[str]) -> None:
    """Refuse, read as the server would read it, an algorithm whose servers measure nothing."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--speculative-algorithm", nargs="?", default="DSPARK", const="")
    asked = parser.parse_known_args(flags)[0].speculative_algorithm
    if asked.upper() != "DSPARK":
        raise ValueError(f"--speculative-algorithm {asked!r} measures no step cost; leave it out, or give DSPARK.")


def check_writable(out: Path) -> None:
    """Refuse, before minutes of measuring, a file that could not be written after them."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written ({error.strerror}); name another file.") from None


def measure(flags: list[str], out: Path, seconds: float) -> int:
    """Run a server until it has written `out`; 0, or the exit code of a server that ended without it.

    Raises:
        ValueError: it serves and has not written it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", *flags, "--speculative-algorithm", "DSPARK"]
    command += ["--host", HERE, "--port", str(port), "--skip-server-warmup"]  # the last of a flag counts
    environment = {**os.environ, "DSPARK_COST_TABLE": str(out.absolute()), "DSPARK_PROFILE_SECONDS": str(seconds)}
    # What it logs is progress, and goes where a person sees it; stdout is for the result.
    with ended_by_signals():
        server = subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
        try:
            while not out.exists():  # written whole or not at all
                if server.poll() is not None:
                    return server.returncode or 1
                if serves(port) and not out.exists():  # in this order: what it writes, it writes before it serves
                    raise ValueError(
                        f"the server is up without having written --out {out}; see its log above, and give more than "
                        f"--seconds {seconds} if no forward fitted into that, or another draft or other flags if "
                        "SGLang schedules these itself."
                    )
                time.sleep(0.2)
            return 0
        finally:
            end(server)


def serves(port: int) -> bool:
    """Whether the server that was started listens, which SGLang's does once its schedulers are ready."""
    connection = HTTPConnection(HERE, port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status != 503
    except (ConnectionRefusedError, TimeoutError):
        return False
    except (OSError, HTTPException):  # it speaks, if not this: with a certificate it is TLS
        return True
    finally:
        connection.close()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the block, as ctrl-C does; the server is in a session of its own, and would stay."""
    mine = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in mine:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask the server and its processes to end, and make those that still run when it has, or after 20 s."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                server.wait(20)
        finally:  # also where a second signal ends the wait
            os.killpg(server.pid, signal.SIGKILL)
    server.wait()


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
