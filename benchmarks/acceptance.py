"""How many tokens a step of a draft yields, per domain, through the real server on prompts left out of its training.

    python -m benchmarks.acceptance --prompts FOLDER --steps 3

Everything drafted is verified (no profile), so the figure is the draft's, not the schedule's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.launch import Server
from benchmarks.prompts import choose, tokenise
from examples.demo import DRAFT, TARGET
from sglang_dspark.train.data import read_prompts

LONGEST = 1024  # prompt tokens; a longer one measures prefill
USERS = 16


def main() -> None:
    """Measure, print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help='folder or file of lines {"turns": ["..."]}')
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sampled-drafts", action="store_true", help="draw drafts, where they are else the argmax")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=40, help="prompts a domain")
    parser.add_argument("--left-out", type=float, default=0.15, help="share left out of training; 1 takes all prompts")
    args = parser.parse_args()
    chosen = choose(read_prompts(args.prompts), args.left_out, args.limit)
    ids, _ = tokenise([prompt.text for prompt in chosen], args.target)
    pairs = [(p.domain, i) for p, i in zip(chosen, ids, strict=True) if len(i) <= LONGEST]
    server = Server(
        *("--model-path", str(args.target), "--max-total-tokens", "65536", "--max-running-requests", str(USERS)),
        *("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(args.draft)),
        *("--speculative-num-steps", str(args.steps)),
        *(("--speculative-use-rejection-sampling",) if args.sampled_drafts else ()),
        env={"DSPARK_PROFILE_SECONDS": "0"},
    )
    replies: list[dict[str, Any]] = []
    with server:
        groups = [pairs[at : at + USERS] for at in range(0, len(pairs), USERS)]
        for group in track(groups, "answering", console=Console(stderr=True)):
            replies += server.generate_all(
                [i for _, i in group], temperature=args.temperature, max_new_tokens=args.new_tokens
            )
    result = summary([domain for domain, _ in pairs], replies, args.steps)
    table = Table(title=f"{args.draft.name}: num_steps {args.steps}, temperature {args.temperature:g}")
    for title in ("domain", "prompts", "steps", "accepted length", "accepted given reached, by position"):
        table.add_column(title, justify="left" if title == "domain" else "right")
    for domain, row in result["domains"].items():
        by_position = " ".join(f"{rate:.2f}" for rate in row["by_position"])
        table.add_row(domain, str(row["prompts"]), str(row["steps"]), f"{row['accepted_length']:.3f}", by_position)
    Console(stderr=True).print(table)
    print(json.dumps(result))


def summary(domains: list[str], replies: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Accepted length and conditional acceptance by position, for each domain and for all together."""
    rows = {}
    for name in ["all", *dict.fromkeys(domains)]:
        meta = [r["meta_info"] for d, r in zip(domains, replies, strict=True) if name in ("all", d)]
        histogram = [0] * (steps + 1)
        for m in meta:
            for accepted, count in enumerate(m.get("spec_correct_drafts_histogram") or []):
                histogram[accepted] += count
        total = sum(histogram)
        reached = [sum(histogram[k:]) for k in range(steps + 1)]
        rows[name] = {
            "prompts": len(meta),
            "steps": total,
            "accepted_length": round(1 + sum(k * n for k, n in enumerate(histogram)) / max(total, 1), 4),
            "by_position": [round(reached[k + 1] / max(reached[k], 1), 4) for k in range(steps)],
        }
    return {"num_steps": steps, "domains": rows}


if __name__ == "__main__":
    main()
