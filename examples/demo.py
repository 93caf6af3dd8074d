"""The main job, shown: real prompts through SGLang's own server: plain, with EAGLE3 as it is, and with DSPARK.

Prints the answers and one table, and ends with 1 if DSPARK's greedy output was not that of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from benchmarks.launch import Server
from benchmarks.prompts import tokenise
from sglang_dspark.train.data import read_prompts

HERE = Path(__file__).parent
TARGET = HERE.parent / "build" / "smollm2-135m"
DRAFT = HERE / "smollm2" / "draft"
SPECULATIVE = ["--speculative-draft-model-path", str(DRAFT)]
MODES = {
    "plain": [],
    "EAGLE3, fixed 3": [
        *("--speculative-algorithm", "EAGLE3", *SPECULATIVE),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ],
    "DSPARK": ["--speculative-algorithm", "DSPARK", *SPECULATIVE],
}


class Outcome(NamedTuple):
    """What one server did with all the prompts."""

    replies: list[dict[str, Any]]
    seconds: float
    dspark: dict[str, Any] | None
    """DSPARK's own counters for the run."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl", help='lines of {"turns": ["..."]}')
    parser.add_argument("--new-tokens", type=int, default=96, help="length of each answer (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object instead of tables")
    return parser


def main() -> int:
    """Run the demo; the exit code."""
    args = build_parser().parse_args()
    console = Console(stderr=args.json)
    try:
        prompts = [prompt.text for prompt in read_prompts(args.prompts)]
    except (OSError, ValueError) as error:
        console.print(f"--prompts {args.prompts} cannot be used: {error}.", markup=False)
        return 2
    ids, tokenizer = tokenise(prompts, TARGET)
    outcomes = {}
    for name, flags in MODES.items():
        with console.status(f"{name}: starting SGLang"):
            server = Server("--model-path", str(TARGET), "--max-total-tokens", "32768", *flags)
            server.__enter__()
        try:
            with console.status(f"{name}: answering {len(prompts)} prompts at once"):
                outcomes[name] = answer(server, ids, args.new_tokens)
        finally:
            server.close()
        console.print(f"{name}: {tokens_of(outcomes[name])} tokens in {outcomes[name].seconds:.1f} s")
    rows = {name: figures(name, outcome, outcomes["plain"]) for name, outcome in outcomes.items()}
    if args.json:
        print(json.dumps(rows))
    else:
        show_answers(console, prompts, outcomes["DSPARK"], tokenizer)
        show_table(console, rows)
    return 0 if rows["DSPARK"]["identical"] else 1


def answer(server: Server, ids: list[list[int]], new_tokens: int) -> Outcome:
    """All prompts at once, greedily, on a server that has been warmed up."""
    server.generate_all(ids, temperature=0, max_new_tokens=8)
    server.flush()
    before = server.info().get("dspark")
    start = time.perf_counter()
    replies = server.generate_all(ids, temperature=0, max_new_tokens=new_tokens)
    seconds = time.perf_counter() - start
    after = server.info().get("dspark")
    counters = None
    if before is not None and after is not None:
        counters = {k: after[k] - before.get(k, 0) for k in COUNTERS} | {k: after[k] for k in ("depths", "modes")}
    return Outcome(replies, seconds, counters)


COUNTERS = ("requests", "drafted", "verified", "accepted", "produced", "target_tokens", "target_tokens_full")


def tokens_of(outcome: Outcome) -> int:
    """Tokens of all answers."""
    return sum(reply["meta_info"]["completion_tokens"] for reply in outcome.replies)


def figures(name: str, outcome: Outcome, plain: Outcome) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"tokens_per_second": round(tokens_of(outcome) / outcome.seconds, 1)}
    meta = [reply["meta_info"] for reply in outcome.replies]
    if outcome.dspark is not None:
        c = outcome.dspark
        row |= {
            "accepted_length": round(c["produced"] / c["requests"], 3),
            "drafted": c["drafted"],
            "verified": c["verified"],
            "accepted": c["accepted"],
            "target_tokens": c["target_tokens"],
            "target_tokens_full": c["target_tokens_full"],
        }
    elif name != "plain":
        steps = 3
        verifies, accepted = (sum(m[k] for m in meta) for k in ("spec_verify_ct", "spec_num_correct_drafts"))
        row |= {
            "accepted_length": round((verifies + accepted) / verifies, 3),
            "drafted": verifies * steps,
            "verified": verifies * steps,
            "accepted": accepted,
            "target_tokens": verifies * (steps + 1),
            "target_tokens_full": verifies * (steps + 1),
        }
    same = [a["output_ids"] == b["output_ids"] for a, b in zip(outcome.replies, plain.replies, strict=True)]
    return row | {"identical": all(same)}


def show_answers(console: Console, prompts: list[str], outcome: Outcome, tokenizer: Any) -> None:
    """Each prompt with DSPARK's answer."""
    for prompt, reply in zip(prompts, outcome.replies, strict=True):
        text = tokenizer.decode(reply["output_ids"], skip_special_tokens=True).strip()
        console.print(Panel(text, title=prompt if len(prompt) < 90 else prompt[:87] + "...", title_align="left"))


def show_table(console: Console, rows: dict[str, dict[str, Any]]) -> None:
    """The comparison."""
    table = Table(title="SmolLM2-135M-Instruct, float32, greedy, all prompts at once")
    columns = {
        "tokens_per_second": "tokens/s",
        "accepted_length": "accepted length",
        "drafted": "draft tokens proposed",
        "verified": "draft tokens verified",
        "accepted": "draft tokens accepted",
        "target_tokens": "target tokens sent",
        "target_tokens_full": "R x (num_steps + 1)",
        "identical": "greedy output identical",
    }
    table.add_column("")
    for name in rows:
        table.add_column(name, justify="right")
    for key, title in columns.items():
        values = [row.get(key, "-") for row in rows.values()]
        table.add_row(title, *("yes" if v is True else "NO" if v is False else str(v) for v in values))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
