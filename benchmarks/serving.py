"""What a server of each kind delivers at each load: plain, EAGLE3 at fixed depths, SGLang's adaptive mode, DSPARK.

    python -m benchmarks.serving --prompts FOLDER

One server of each kind is started in turn within a round, and rounds repeat, so that slow changes of the machine meet
all of them alike; figures are medians over rounds. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import requests
from rich.console import Console
from rich.table import Table

from benchmarks.launch import Server
from benchmarks.prompts import choose, tokenise
from examples.demo import DRAFT, HERE, TARGET
from sglang_dspark.train.data import read_prompts

LONGEST = 512  # prompt tokens


class Run(NamedTuple):
    """One kind of server at one load, once."""

    tokens_per_second: float
    tpot: list[float]
    """Seconds a token after the first, of each request."""
    accepted_length: float | None
    dspark: dict[str, Any] | None


def modes(draft: Path) -> dict[str, list[str]]:
    """Server flags of each kind."""
    eagle = ["--speculative-draft-model-path", str(draft)]

    def fixed(steps: int) -> list[str]:
        return [
            *("--speculative-algorithm", "EAGLE3", *eagle, "--speculative-num-steps", str(steps)),
            *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)),
        ]

    return {
        "plain": [],
        **{f"eagle3_{steps}": fixed(steps) for steps in (1, 3, 5)},
        "eagle3_adaptive": [*fixed(3), "--speculative-adaptive"],
        "dspark": ["--speculative-algorithm", "DSPARK", *eagle],
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompts",
        type=Path,
        default=HERE / "prompts.jsonl",
        help="folder or file",
    )
    parser.add_argument("--left-out", type=float, default=0.15, help="share left out of training; 1 takes all prompts")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="requests at each load, or one a user if more")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of a server (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--modes", nargs="+", default=None, help="a part of the kinds (default all)")
    return parser


def main() -> None:
    """Run all rounds."""
    args = build_parser().parse_args()
    console = Console(stderr=True)
    found = choose(read_prompts(args.prompts), args.left_out, max(args.users))
    ids, _ = tokenise([prompt.text for prompt in found], args.target)
    ids = mixed([prompt.domain for prompt in found], ids)
    kinds = {k: v for k, v in modes(args.draft).items() if args.modes is None or k in args.modes}
    runs: dict[tuple[int, str], list[Run]] = defaultdict(list)
    for number in range(args.rounds):
        for name, flags in list(kinds.items()):
            with console.status(f"round {number + 1}/{args.rounds}: {name}"):
                try:
                    measure(name, flags, args, ids, runs)
                except RuntimeError as error:  # a kind that this machine's SGLang cannot start
                    console.print(f"{name} left out: {str(error).splitlines()[-1][:200]}", markup=False)
                    del kinds[name]
    loads = [summary(users, kinds, runs) for users in args.users]
    show(console, loads, kinds)
    print(json.dumps({"temperature": args.temperature, "rounds": args.rounds, "sweep": sweep(loads), "loads": loads}))


def mixed(domains: list[str], ids: list[list[int]]) -> list[list[int]]:
    """The prompts that are short enough, domain by turn, so that every load meets the same mixture."""
    rows: dict[str, list[list[int]]] = defaultdict(list)
    for domain, prompt in zip(domains, ids, strict=True):
        if len(prompt) <= LONGEST:
            rows[domain].append(prompt)
    turns = itertools.zip_longest(*rows.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def measure(
    name: str, flags: list[str], args: argparse.Namespace, ids: list[list[int]], runs: dict[tuple[int, str], list[Run]]
) -> None:
    """One server, all loads."""
    most = max(args.users)
    pool = ("--max-total-tokens", str(most * 1024), "--max-running-requests", str(most))
    with Server("--model-path", str(args.target), *pool, *flags, threads=args.threads) as server:
        load(server, ids, min(8, most), args)  # warm-up
        for users in args.users:
            runs[users, name].append(load(server, ids, users, args))


def load(server: Server, ids: list[list[int]], users: int, args: argparse.Namespace) -> Run:
    """``users`` clients that take the next prompt as soon as their last one is answered."""
    server.flush()
    before = server.info().get("dspark")
    chosen = [ids[i % len(ids)] for i in range(max(users, args.requests))]
    start = time.perf_counter()
    with ThreadPoolExecutor(users) as pool:
        replies = list(pool.map(lambda prompt: stream(server, prompt, args), chosen))
    seconds = time.perf_counter() - start
    tokens = sum(reply["tokens"] for reply in replies)
    verifies = sum(reply["verifies"] for reply in replies)
    after = server.info().get("dspark")
    return Run(
        tokens / seconds,
        [reply["tpot"] for reply in replies],
        (sum(reply["accepted"] for reply in replies) + verifies) / verifies if verifies else None,
        None if before is None or after is None else difference(before, after),
    )


def stream(server: Server, prompt: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """One streamed request and its times."""
    sampling = {"temperature": args.temperature, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    first, last, meta = 0.0, 0.0, {}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=600) as reply:
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
                meta = json.loads(line[6:])["meta_info"]
    tokens = meta["completion_tokens"]
    return {
        "tokens": tokens,
        "tpot": (last - first) / max(tokens - 1, 1),
        "verifies": meta.get("spec_verify_ct", 0),
        "accepted": meta.get("spec_num_correct_drafts", 0),
    }


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a load added to DSPARK's counters."""
    names = ("steps", "requests", "drafted", "verified", "accepted", "target_tokens", "rest_steps")
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    depths = {d: n - before["depths"].get(d, 0) for d, n in after["depths"].items()}
    mean_budget = round(counted["verified"] / max(counted["steps"], 1), 2)
    return {**counted, "mean_budget": mean_budget, "depths": {d: n for d, n in depths.items() if n}}


def summary(users: int, kinds: dict[str, Any], runs: dict[tuple[int, str], list[Run]]) -> dict[str, Any]:
    """Medians over rounds of one load."""
    row: dict[str, Any] = {"users": users}
    figures = ("tokens_per_second", "tpot_p50", "tpot_p99", "accepted_length")
    row.update({name: {} for name in figures})
    for kind in kinds:
        mine = runs[users, kind]
        tpot = sorted(t for run in mine for t in run.tpot)
        lengths = [run.accepted_length for run in mine if run.accepted_length is not None]
        row["tokens_per_second"][kind] = round(statistics.median(run.tokens_per_second for run in mine), 2)
        row["tpot_p50"][kind] = round(tpot[len(tpot) // 2], 5)
        row["tpot_p99"][kind] = round(tpot[min(int(len(tpot) * 0.99), len(tpot) - 1)], 5)
        row["accepted_length"][kind] = round(statistics.median(lengths), 3) if lengths else 1.0
    if "dspark" in kinds:
        others = [v for k, v in row["tokens_per_second"].items() if k != "dspark"]
        row["dspark_to_best"] = round(row["tokens_per_second"]["dspark"] / max(others), 3) if others else None
        row["dspark"] = [run.dspark for run in runs[users, "dspark"]]
    return row


def sweep(loads: list[dict[str, Any]]) -> dict[str, float]:
    """Each kind over all loads: the mean of its share of the best at each."""
    rates = [row["tokens_per_second"] for row in loads]
    return {kind: round(statistics.mean(r[kind] / max(r.values()) for r in rates), 4) for kind in rates[0]}


def show(console: Console, loads: list[dict[str, Any]], kinds: dict[str, Any]) -> None:
    """Tokens per second, kinds across and loads down."""
    table = Table(title="tokens/s (accepted length)")
    table.add_column("users", justify="right")
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("DSPARK / best other", justify="right")
    for row in loads:
        cells = [f"{row['tokens_per_second'][k]:.1f} ({row['accepted_length'][k]:.2f})" for k in kinds]
        table.add_row(str(row["users"]), *cells, str(row.get("dspark_to_best", "-")))
    console.print(table)
    console.print("share of the best, mean over the loads: ", sweep(loads))


if __name__ == "__main__":
    main()
