"""What a server of each kind delivers at each load: plain, EAGLE3 at fixed depths, SGLang's adaptive mode, DSPARK.

    python -m benchmarks.serving --prompts FOLDER [--variants]

One server of each kind is started, and all of them stay up. Each load goes to all of them at once, and they take turns
of some seconds, the others at a stand amid their answers, so that slow changes of the machine meet all of them alike;
every time below is one of a server's own turns. Figures are medians over the rounds of all starts, DSPARK's ratio to
the best of the others too. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import requests
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.launch import Server
from benchmarks.prompts import choose, tokenise
from benchmarks.turns import Player, take_turns
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


class Kind(NamedTuple):
    """How a server is started."""

    flags: list[str]
    env: dict[str, str] | None = None


def kinds_of(draft: Path) -> dict[str, Kind]:
    """Every kind of server; the last three are DSPARK in other ways, see VARIANTS."""
    eagle = ["--speculative-draft-model-path", str(draft)]

    def fixed(steps: int, *more: str) -> Kind:
        chain = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1))
        steps_flag = ("--speculative-num-steps", str(steps))
        return Kind(["--speculative-algorithm", "EAGLE3", *eagle, *steps_flag, *chain, *more])

    dspark = ["--speculative-algorithm", "DSPARK", *eagle]
    return {
        "plain": Kind([]),
        **{f"eagle3_{steps}": fixed(steps) for steps in (1, 3, 5)},
        "eagle3_adaptive": fixed(3, "--speculative-adaptive"),
        "dspark": Kind(dspark),
        "dspark_drawn": Kind([*dspark, "--speculative-use-rejection-sampling"]),
        "dspark_estimator": Kind(dspark, {"DSPARK_CONFIDENCE_HEAD": "off"}),
        "dspark_blind": Kind(dspark, {"DSPARK_POLICY": "benchmarks.policies:Blind"}),
    }


# With drafts drawn for sampled requests; and in place of the draft's confidence head the estimator, or nothing but each
# position's pooled acceptance.
VARIANTS = ("dspark_drawn", "dspark_estimator", "dspark_blind")


def build_parser() -> argparse.ArgumentParser:
    parser = common_parser(__doc__)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--starts", type=int, default=1, help="servers started anew so often: luck lasts a start")
    parser.add_argument("--rounds", type=int, default=3, help="of all loads, each start")
    parser.add_argument("--requests", type=int, default=8, help="requests at each load, or --each a user if more")
    parser.add_argument("--each", type=int, default=2, help="requests a user at least, one after the other")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--modes", nargs="+", default=None, help="a part of the kinds (default all)")
    parser.add_argument("--variants", action="store_true", help="also DSPARK with drawn drafts, without head, blind")
    return parser


def common_parser(doc: str) -> argparse.ArgumentParser:
    """What every benchmark of servers is told: its prompts, its pair and its threads."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl", help="folder or file")
    parser.add_argument("--left-out", type=float, default=0.15, help="share left out of training; 1 takes all prompts")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of a server (default %(default)s)")
    parser.add_argument("--turn", type=float, default=3.0, help="seconds of a server's turn (default %(default)s)")
    return parser


def main() -> None:
    """Run all rounds."""
    args = build_parser().parse_args()
    console = Console(stderr=True)
    ids = prompt_ids(args, max(args.users))
    if len(ids) < max(args.users):
        console.print(f"{len(ids)} prompts: of {max(args.users)} users the later ones find theirs in the prefix cache.")
    kinds = {
        name: kind
        for name, kind in kinds_of(args.draft).items()
        if (name in args.modes if args.modes else args.variants or name not in VARIANTS)
    }
    runs: dict[tuple[int, str], list[Run]] = defaultdict(list)
    for number in range(args.starts):
        kinds = {name: kinds[name] for name in one_start(kinds, ids, args, number * args.rounds, runs, console)}
    loads = [summary(users, list(kinds), runs) for users in args.users]
    show(console, loads, list(kinds))
    how = {"temperature": args.temperature, "starts": args.starts, "rounds": args.rounds, "turn": args.turn}
    print(json.dumps({**how, "sweep": sweep(loads), "loads": loads}))


def one_start(
    kinds: dict[str, Kind],
    ids: list[list[int]],
    args: argparse.Namespace,
    first: int,
    runs: dict[tuple[int, str], list[Run]],
    console: Console,
) -> list[str]:
    """Start a server of each kind and add all rounds, the first of which is number ``first``, to ``runs``.

    Returns the kinds that could be started.
    """
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for name, kind in kinds.items():
            with console.status(f"start: {name}"):
                try:
                    player = Player(stack.enter_context(start(kind, args, max(args.users))))
                except RuntimeError as error:  # a kind that this machine's SGLang cannot start
                    console.print(f"{name} left out: {str(error).splitlines()[-1][:200]}", markup=False)
                    continue
                load([player], ids, min(8, max(args.users)), args.requests, args)  # warm-up
                players[name] = player
        turns = [(number, users) for number in range(first, first + args.rounds) for users in args.users]
        for number, users in track(turns, "loads", console=console):
            names = sorted(players, key=list(players).index, reverse=number % 2 == 1)
            count = max(users * args.each, args.requests)
            done = load([players[name] for name in names], ids, users, count, args)
            for name, run in zip(names, done, strict=True):
                runs[users, name].append(run)
    return list(players)


def prompt_ids(args: argparse.Namespace, limit: int) -> list[list[int]]:
    """At most ``limit`` prompts of each domain, those short enough, domain by turn: every load meets one mixture."""
    found = choose(read_prompts(args.prompts), args.left_out, limit)
    ids, _ = tokenise([prompt.text for prompt in found], args.target)
    rows: dict[str, list[list[int]]] = defaultdict(list)
    for prompt, tokens in zip(found, ids, strict=True):
        if len(tokens) <= LONGEST:
            rows[prompt.domain].append(tokens)
    turns = itertools.zip_longest(*rows.values())
    return [tokens for turn in turns for tokens in turn if tokens is not None]


def start(kind: Kind, args: argparse.Namespace, most: int) -> Server:
    """A server of one kind, with room for ``most`` users."""
    pool = ("--max-total-tokens", str(most * 1024), "--max-running-requests", str(most))
    return Server("--model-path", str(args.target), *pool, *kind.flags, env=kind.env, threads=args.threads)


def load(players: list[Player], ids: list[list[int]], users: int, count: int, args: argparse.Namespace) -> list[Run]:
    """``count`` requests of ``users`` clients to each, which take the next prompt as soon as their last is answered."""
    chosen = [ids[i % len(ids)] for i in range(count)]

    def counters(player: Player) -> Any:
        return player.server.info().get("dspark")

    def replies(player: Player) -> tuple[list[dict[str, Any]], float]:
        start = player.seconds()
        with ThreadPoolExecutor(users) as pool:
            return list(pool.map(lambda prompt: stream(player, prompt, args), chosen)), player.seconds() - start

    for player in players:
        player.server.flush()
    before = [counters(player) for player in players]
    answers = take_turns(players, replies, args.turn)
    after = [counters(player) for player in players]
    return [run(*answer, *counted) for answer, counted in zip(answers, zip(before, after, strict=True), strict=True)]


def run(answers: list[dict[str, Any]], seconds: float, before: Any, after: Any) -> Run:
    """A load's figures, from its answers and DSPARK's counters before and after it."""
    verifies = sum(answer["verifies"] for answer in answers)
    return Run(
        sum(answer["tokens"] for answer in answers) / seconds,
        [answer["tpot"] for answer in answers],
        (sum(answer["accepted"] for answer in answers) + verifies) / verifies if verifies else None,
        None if before is None or after is None else difference(before, after),
    )


def stream(player: Player, prompt: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """One streamed request and its times."""
    sampling = {"temperature": args.temperature, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    first, last, meta = 0.0, 0.0, {}
    with requests.post(f"{player.server.url}/generate", json=body, stream=True, timeout=1800) as reply:
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                last = player.seconds()
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


def summary(users: int, kinds: list[str], runs: dict[tuple[int, str], list[Run]]) -> dict[str, Any]:
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
        rates = {k: v for k, v in row["tokens_per_second"].items() if not k.startswith("dspark")}
        if rates:
            best = max(rates, key=lambda kind: rates[kind])
            pairs = zip(runs[users, "dspark"], runs[users, best], strict=True)
            ratio = statistics.median(mine.tokens_per_second / its.tokens_per_second for mine, its in pairs)
            row["dspark_to_best"] = round(ratio, 3)
        row["dspark"] = [run.dspark for run in runs[users, "dspark"]]
    return row


def sweep(loads: list[dict[str, Any]]) -> dict[str, float]:
    """Each kind over all loads: the mean of its share of the best at each."""
    rates = [row["tokens_per_second"] for row in loads]
    return {kind: round(statistics.mean(r[kind] / max(r.values()) for r in rates), 4) for kind in rates[0]}


def show(console: Console, loads: list[dict[str, Any]], kinds: list[str]) -> None:
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
