"""How well each source of confidence tells which draft tokens survive, per domain, verify rule and position.

    python -m benchmarks.confidence --record ../shared/data/prompts --trace build/traces/confidence.trace
    python -m benchmarks.confidence --trace build/traces/confidence.trace

The first records a trace from the real server on prompts left out of the draft's training, half of the requests greedy
and half at temperature 1, everything drafted being verified. The second judges the sources on it; it needs no model.

Everybody is judged on the same rows: those after the first WARM_UP / 3 steps of each domain. The estimator has learnt
from the steps before, and goes on learning as it does in a server: a step is judged before it is learnt from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from sglang_dspark.confidence import FEATURES, HEAD, HEADLESS, RULES, Estimator, Rows, Source
from sglang_dspark.confidence.reliability import auc, calibration_error
from sglang_dspark.observe import Trace, read_trace

STEPS = 5
USERS = 16
LONGEST = 1024  # prompt tokens; a longer one measures prefill
WARM_UP = 200  # steps that the estimator learns from before it is judged, all domains together
LEAST = 100  # a position with fewer rows is left out: its figures would be noise
WINDOW = 50  # steps of a point of the calibration error over time


class Step(NamedTuple):
    """One step of the trace."""

    rows: Rows
    records: NDArray[Any]


def main() -> None:
    """Record or judge; a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="the trace; its domains are in FILE.json beside it")
    parser.add_argument("--record", type=Path, metavar="PROMPTS", help='first record it: files of {"turns": ["..."]}')
    parser.add_argument("--limit", type=int, default=40, help="prompts a domain")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, help="of the recording server; all cores if not given")
    args = parser.parse_args()
    if args.record is not None:
        record(args.record, args.trace, args.limit, args.new_tokens, args.threads)
    trace = read_trace(args.trace)
    domains = split(trace, json.loads(_beside(args.trace).read_text()))
    result = {"domains": judge(trace, domains), "switch": switch(trace, domains)}
    show(result)
    print(json.dumps(result))


def _beside(trace: Path) -> Path:
    return trace.with_name(f"{trace.name}.json")


# -- recording -----------------------------------------------------------------------------------------------------


def record(prompts: Path, out: Path, limit: int, new_tokens: int, threads: int | None) -> None:
    """Serve each domain's left-out prompts at temperature 0 and 1; a trace, and each domain's steps beside it."""
    from benchmarks.launch import Server
    from benchmarks.prompts import choose, tokenise
    from examples.demo import DRAFT, TARGET
    from sglang_dspark.train.data import read_prompts

    out.parent.mkdir(parents=True, exist_ok=True)
    chosen = choose(read_prompts(prompts), 0.15, limit)
    ids, _ = tokenise([prompt.text for prompt in chosen], TARGET)
    console = Console(stderr=True)
    server = Server(
        *("--model-path", str(TARGET), "--max-total-tokens", "65536", "--max-running-requests", str(USERS)),
        *("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(DRAFT)),
        *("--speculative-num-steps", str(STEPS)),
        env={"DSPARK_PROFILE_SECONDS": "0", "DSPARK_TRACE": str(out.resolve())},
        threads=threads,
    )
    steps = {}
    with server, ThreadPoolExecutor(USERS) as pool:
        for domain in dict.fromkeys(prompt.domain for prompt in chosen):
            mine = [i for p, i in zip(chosen, ids, strict=True) if p.domain == domain and len(i) <= LONGEST]
            start = server.info()["dspark"].get("steps", 0)
            with console.status(f"{domain}: {2 * len(mine)} answers"):
                jobs = [
                    pool.submit(server.generate, i, timeout=3600, temperature=t, max_new_tokens=new_tokens)
                    for i in mine
                    for t in (0.0, 1.0)
                ]
                for job in jobs:
                    job.result()
            steps[domain] = [start + 1, server.info()["dspark"]["steps"]]
    _beside(out).write_text(json.dumps(steps))


def split(trace: Trace, domains: dict[str, list[int]]) -> dict[str, list[Step]]:
    """The steps of each domain, by its first and last step's number."""
    return {
        name: [step for step in steps_of(trace) if first <= step.records["step"][0] <= last]
        for name, (first, last) in domains.items()
    }


def steps_of(trace: Trace) -> Iterator[Step]:
    ends = np.flatnonzero(np.diff(trace.records["step"], append=-1)) + 1
    requests = np.unique(trace.records["request"], return_inverse=True)[1]  # each request a slot of its own
    for start, end in zip([0, *ends], ends, strict=False):
        records = trace.records[start:end]
        rows = Rows(requests[start:end], np.zeros(end - start, np.int64), records["rule"].astype(np.int64))
        yield Step(rows, records)


# -- the sources -----------------------------------------------------------------------------------------------------


class Replay:
    """A source on the trace: what it says of a step, and learning from it."""

    def __init__(self, trace: Trace, source: Source, learns: bool) -> None:
        self.columns = [trace.features.index(name) for name in source.shown]
        self.learns = learns
        self.estimator = Estimator(len(trace.records), trace.gamma, source)

    def confidence(self, step: Step) -> NDArray[np.float64]:
        """[R, gamma]"""
        return self.estimator.evaluate(torch.from_numpy(self._shown(step)), step.rows).double().numpy()

    def learn(self, step: Step) -> None:
        records = step.records
        accepted, verified = records["accepted"].astype(np.int64), records["verified"].astype(np.int64)
        clean = (records["clean"] > 0) & self.learns
        recent = self.estimator.recent(step.rows)
        self.estimator.observe(self._shown(step), recent, step.rows, accepted, verified, clean)

    def _shown(self, step: Step) -> NDArray[np.float32]:
        return np.ascontiguousarray(step.records["shown"][..., self.columns])


class MaxProbability:
    """The draft's probability of its most likely token, as it is."""

    def __init__(self, trace: Trace) -> None:
        self.column = trace.features.index(FEATURES[0])

    def confidence(self, step: Step) -> NDArray[np.float64]:
        return 1 / (1 + np.exp(-step.records["shown"][..., self.column].astype(np.float64)))

    def learn(self, step: Step) -> None:
        pass


def sources(trace: Trace) -> dict[str, Any]:
    """Every source that the trace has the data of."""
    found: dict[str, Any] = {
        "max-probability": MaxProbability(trace),
        "estimator, cold": Replay(trace, HEADLESS, learns=False),
        f"estimator after {WARM_UP} steps": Replay(trace, HEADLESS, learns=True),
    }
    if set(HEAD.shown) <= set(trace.features):
        found["head"] = Replay(trace, HEAD, learns=False)
        found[f"head after {WARM_UP} steps"] = Replay(trace, HEAD, learns=True)
    return found


# -- judging ---------------------------------------------------------------------------------------------------------


def judge(trace: Trace, domains: dict[str, list[Step]]) -> dict[str, Any]:
    """Of each domain, rule and position: rows, and for each source the figures of :func:`position_figures`."""
    share = WARM_UP // len(domains)
    result: dict[str, Any] = {name: {rule: [{} for _ in range(trace.gamma)] for rule in RULES} for name in domains}
    for domain, steps in domains.items():
        for label, source in sources(trace).items():  # each domain after the same warm-up, not after one another
            for turn in zip(*(other[:share] for other in domains.values()), strict=False):
                for step in turn:
                    source.learn(step)
            said = []
            for step in steps[share:]:
                said.append(source.confidence(step))
                source.learn(step)
            records = np.concatenate([step.records for step in steps[share:]])
            for index, rule in enumerate(RULES):
                mine = (records["rule"] == index) & (records["clean"] > 0)
                for k, row in enumerate(result[domain][rule]):
                    figures = position_figures(np.concatenate(said)[mine], records[mine], k)
                    if figures is not None:
                        row["rows"], row["reached"] = figures.pop("rows"), figures.pop("reached")
                        row[label] = figures
    return result


def position_figures(confidence: NDArray[np.float64], records: NDArray[Any], k: int) -> dict[str, float] | None:
    """AUC and calibration error of survival to position k (from 0), of the rows that verified it, and of its
    acceptance, of those that reached it; None with too few of these."""
    verified = records["verified"] > k
    accepted = records["accepted"][verified]
    survival, own = confidence[verified, : k + 1].prod(axis=1), confidence[verified, k]
    reached = accepted >= k
    if np.count_nonzero(reached) < LEAST:
        return None
    return {
        "rows": int(verified.sum()),
        "reached": int(reached.sum()),
        "auc": round(auc(survival, accepted > k), 4),
        "ece": round(calibration_error(survival, accepted > k), 4),
        "auc_accepted": round(auc(own[reached], accepted[reached] > k), 4),
        "ece_accepted": round(calibration_error(own[reached], accepted[reached] > k), 4),
    }


def switch(trace: Trace, domains: dict[str, list[Step]]) -> dict[str, Any]:
    """Calibration error of acceptance in windows of WINDOW steps, from a cold start: code, then chat, then the rest.

    Of the estimator as it learns, and of one that stops learning at the first switch. Requests of two domains never
    share a step, so the order in which they were recorded does not matter.
    """
    series: dict[str, Any] = {}
    learning, stopping = Replay(trace, HEADLESS, learns=True), Replay(trace, HEADLESS, learns=True)
    for domain in sorted(domains, key=lambda name: (name != "code", name != "chat")):
        steps, rows = domains[domain], []
        for at in range(0, len(steps) - WINDOW + 1, WINDOW):
            window = steps[at : at + WINDOW]
            said: dict[str, list[NDArray[np.float64]]] = {"online": [], "stopped": []}
            for step in window:
                said["online"].append(learning.confidence(step))
                said["stopped"].append(stopping.confidence(step))
                learning.learn(step)
                stopping.learn(step)
            records = np.concatenate([step.records for step in window])
            seen = np.arange(trace.gamma) < np.minimum(records["verified"], records["accepted"] + 1)[:, None]
            happened = (np.arange(trace.gamma) < records["accepted"][:, None])[seen]
            errors = {name: calibration_error(np.concatenate(c)[seen], happened) for name, c in said.items()}
            rows.append({"steps": at + WINDOW, **{name: round(error, 4) for name, error in errors.items()}})
        series[domain] = rows
        stopping.learns = False
    return series


def show(result: dict[str, Any]) -> None:
    """Two tables on stderr."""
    console = Console(stderr=True, width=160)
    table = Table(title="Survival: AUC / calibration error; in brackets AUC of acceptance given reached")
    labels = list(next(iter(result["domains"].values()))[RULES[0]][0])[2:]
    for title in ("domain", "rule", "position", "rows", "reached", *labels):
        table.add_column(title, justify="left" if title in ("domain", "rule") else "right")
    for domain, rules in result["domains"].items():
        for rule, positions in rules.items():
            for k, row in enumerate(positions):
                if row:
                    cells = (row[label] for label in labels)
                    table.add_row(
                        *(domain, rule, str(k + 1), str(row["rows"]), str(row["reached"])),
                        *(f"{c['auc']:.3f} / {c['ece']:.3f} ({c['auc_accepted']:.3f})" for c in cells),
                    )
    console.print(table)
    table = Table(title=f"Calibration error of acceptance by {WINDOW} steps, domains one after the other from cold")
    for title in ("domain", "steps", "learning", "stopped after the first domain"):
        table.add_column(title, justify="left" if title == "domain" else "right")
    for domain, rows in result["switch"].items():
        for row in rows:
            table.add_row(domain, str(row["steps"]), f"{row['online']:.3f}", f"{row['stopped']:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
