"""What DSPARK costs while next to nothing of its drafts is accepted, and how soon it is back when acceptance returns.

    python -m benchmarks.recovery --prompts FOLDER

A plain server and a DSPARK one serve the same windows of requests by turns of seconds: first greedy ones, then ones at
a temperature at which hardly any draft survives, then greedy ones again. The first window of a phase is the guard's to
notice; the others are what counts. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving import common_parser, kinds_of, load, prompt_ids, start
from benchmarks.turns import Player

KINDS = ("plain", "dspark")


def build_parser() -> argparse.ArgumentParser:
    parser = common_parser(__doc__)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8, help="requests in a window (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--hot", type=float, default=3.0, help="temperature of the phase without acceptance")
    parser.add_argument("--windows", type=int, default=3, help="windows in a phase (default %(default)s)")
    return parser


def main() -> None:
    """Run the phases."""
    args = build_parser().parse_args()
    console = Console(stderr=True)
    ids = prompt_ids(args, args.requests)
    phases: list[dict[str, Any]] = []
    with ExitStack() as stack:
        kinds = kinds_of(args.draft)
        players = [Player(stack.enter_context(start(kinds[name], args, args.users))) for name in KINDS]
        for name, temperature in (("warm-up", 0.0), ("greedy", 0.0), ("hot", args.hot), ("greedy again", 0.0)):
            args.temperature = temperature
            windows = []
            for number in range(1 if name == "warm-up" else args.windows):
                with console.status(f"{name}, window {number + 1}"):
                    windows.append(dict(zip(KINDS, load(players, ids, args.users, args.requests, args), strict=True)))
            if name != "warm-up":
                phases.append(summary(name, temperature, windows))
    show(console, phases)
    print(json.dumps({"users": args.users, "phases": phases}))


def summary(name: str, temperature: float, windows: list[dict[str, Any]]) -> dict[str, Any]:
    """A phase's rates; the ratio is the median over all windows but the first."""
    rates = {kind: [round(window[kind].tokens_per_second, 2) for window in windows] for kind in KINDS}
    ratios = [mine / plain for plain, mine in zip(*(rates[kind] for kind in KINDS), strict=True)]
    return {
        "phase": name,
        "temperature": temperature,
        "tokens_per_second": rates,
        "first_window": round(ratios[0], 3),
        "dspark_to_plain": round(statistics.median(ratios[1:] or ratios), 3),
        "accepted_length": [round(window["dspark"].accepted_length or 1.0, 3) for window in windows],
        "depths": [window["dspark"].dspark["depths"] for window in windows],
    }


def show(console: Console, phases: list[dict[str, Any]]) -> None:
    """A line a phase."""
    table = Table(title="DSPARK / plain")
    for column in ("phase", "temperature", "first window", "later windows", "accepted length"):
        table.add_column(column, justify="right")
    for phase in phases:
        lengths = " ".join(f"{length:.2f}" for length in phase["accepted_length"])
        figures = (phase["temperature"], phase["first_window"], phase["dspark_to_plain"])
        table.add_row(phase["phase"], *map(str, figures), lengths)
    console.print(table)


if __name__ == "__main__":
    main()
