"""How well each source of confidence tells which draft tokens survive, per domain, verify rule and position.

    python -m benchmarks.confidence --record ../shared/data/prompts --trace build/traces/confidence.trace
    python -m benchmarks.confidence --trace build/traces/confidence.trace

The first records a trace from the real server on prompts left out of the draft's training, half of the requests greedy
and half at temperature 1, everything drafted being verified. The second judges the sources on it; it needs no model.

Everybody is judged on the same rows: those after the first WARM_UP / 3 steps of each domain. What learns has learnt
from the steps before, and goes on learning as it does in a server: a step is judged before it is learnt from. What is
called calibrated has its temperatures from the other half of the requests. "all" pools the domains' rows.
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

from sglang_dspark.commands.calibrate import raw_logits
from sglang_dspark.confidence import FEATURES, HEAD, HEADLESS, RULES, Estimator, Rows, Source
from sglang_dspark.confidence.calibration import fit_temperatures
from sglang_dspark.confidence.reliability import auc, calibration_error
from sglang_dspark.observe import Trace, read_trace

STEPS = 5
USERS = 16
LONGEST = 1024  # prompt tokens; a longer one measures prefill
WARM_UP = 200  # steps that the estimator learns from before it is judged, all domains together
LEAST = 100  # a position with fewer rows is left out: its figures would be noise
WINDOW = 50  # steps of a point of the calibration error over time
RESAMPLES = 200  # of the requests, for the standard errors


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
    parser.add_argument("--draft", type=Path, help="the recording server's draft; the shipped one if not given")
    args = parser.parse_args()
    if args.record is not None:
        record(args.record, args.trace, args.limit, args.new_tokens, args.threads, args.draft)
    trace = read_trace(args.trace)
    domains = split(trace, json.loads(_beside(args.trace).read_text()))
    result = {"domains": judge(trace, domains), "switch": switch(trace, domains)}
    show(result)
    print(json.dumps(result))


def _beside(trace: Path) -> Path:
    return trace.with_name(f"{trace.name}.json")


# -- recording -----------------------------------------------------------------------------------------------------


def record(prompts: Path, out: Path, limit: int, new_tokens: int, threads: int | None, draft: Path | None) -> None:
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
        *("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(draft or DRAFT)),
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


def slots_of(trace: Trace) -> NDArray[np.int64]:
    """[n] for each record the slot of its request, one of its own."""
    return np.unique(trace.records["request"], return_inverse=True)[1]


def steps_of(trace: Trace) -> Iterator[Step]:
    ends = np.flatnonzero(np.diff(trace.records["step"], append=-1)) + 1
    requests = slots_of(trace)
    for start, end in zip([0, *ends], ends, strict=False):
        records = trace.records[start:end]
        rows = Rows(requests[start:end], np.zeros(end - start, np.int64), records["rule"].astype(np.int64))
        yield Step(rows, records)


# -- the sources -----------------------------------------------------------------------------------------------------


class Replay:
    """A source on the trace: what it says of a step, and learning from it."""

    def __init__(
        self, trace: Trace, source: Source, learns: bool, temperatures: NDArray[np.float64] | None = None
    ) -> None:
        self.columns = [trace.features.index(name) for name in source.shown]
        self.learns = learns
        self.estimator = Estimator(len(trace.records), trace.gamma, source, temperatures)

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


class Calibrated:
    """The trace's own source with temperatures fitted to the trace, to one half of its requests for the other."""

    def __init__(self, trace: Trace, source: Source) -> None:
        self.halves = [Replay(trace, source, False, temperatures(trace, other)) for other in (1, 0)]

    def confidence(self, step: Step) -> NDArray[np.float64]:
        """[R, gamma]"""
        second = half_of(step.rows.slots) == 1
        return np.where(second[:, None], *(replay.confidence(step) for replay in reversed(self.halves)))

    def learn(self, step: Step) -> None:
        for replay in self.halves:
            replay.learn(step)


def half_of(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 or 1, by twos: a prompt's greedy and sampled answers were asked for one after the other."""
    return slots // 2 % 2


def temperatures(trace: Trace, half: int) -> NDArray[np.float64]:
    """[rules, gamma] fitted to the requests of one half."""
    records = trace.records
    logits, mine = raw_logits(trace), (half_of(slots_of(trace)) == half) & (records["clean"] > 0)
    rows = [mine & (records["rule"] == index) for index in range(len(RULES))]
    outcomes = [records[name].astype(np.int64) for name in ("accepted", "verified")]
    return np.array([fit_temperatures(logits[of], *(o[of] for o in outcomes))[0] for of in rows])


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
        found["head, calibrated"] = Calibrated(trace, HEAD)
        found[f"head after {WARM_UP} steps"] = Replay(trace, HEAD, learns=True)
    return found


# -- judging ---------------------------------------------------------------------------------------------------------


def judge(trace: Trace, domains: dict[str, list[Step]]) -> dict[str, Any]:
    """Of each domain (and "all"), rule and position: rows, and for each source the figures of position_figures."""
    share = WARM_UP // len(domains)
    warm_up = [step for turn in zip(*(steps[:share] for steps in domains.values()), strict=False) for step in turn]
    judged = {domain: np.concatenate([step.records for step in steps[share:]]) for domain, steps in domains.items()}
    said: dict[str, dict[str, NDArray[np.float64]]] = {}
    for domain, steps in domains.items():
        for label, source in sources(trace).items():  # each domain after the same warm-up, not after one another
            for step in warm_up:
                source.learn(step)
            rows = []
            for step in steps[share:]:
                rows.append(source.confidence(step))
                source.learn(step)
            said.setdefault(label, {})[domain] = np.concatenate(rows)
    result: dict[str, Any] = {}
    for name, parts in {"all": list(domains), **{domain: [domain] for domain in domains}}.items():
        pooled = {label: np.concatenate([by_domain[part] for part in parts]) for label, by_domain in said.items()}
        result[name] = figures(np.concatenate([judged[part] for part in parts]), pooled)
    return result


def figures(records: NDArray[Any], said: dict[str, NDArray[np.float64]]) -> dict[str, list[dict[str, Any]]]:
    """For each rule and position a row of each source's figures; records [n], confidences of a source [n, gamma]."""
    result: dict[str, list[dict[str, Any]]] = {rule: [] for rule in RULES}
    for index, rule in enumerate(RULES):
        mine = (records["rule"] == index) & (records["clean"] > 0)
        for k in range(records["shown"].shape[1]):
            row: dict[str, Any] = {}
            for label, confidence in said.items():
                found = position_figures(confidence[mine], records[mine], k)
                if found is not None:
                    row["rows"], row["reached"] = found.pop("rows"), found.pop("reached")
                    row[label] = found
            result[rule].append(row)
    return result


def position_figures(confidence: NDArray[np.float64], records: NDArray[Any], k: int) -> dict[str, float] | None:
    """AUC (with its standard error) and calibration error of survival to position k (from 0), of the rows that verified
    it, and of its acceptance, of those that reached it; None with too few of these."""
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
        "auc_error": round(auc_error(survival, accepted > k, records["request"][verified]), 4),
        "ece": round(calibration_error(survival, accepted > k), 4),
        "auc_accepted": round(auc(own[reached], accepted[reached] > k), 4),
        "ece_accepted": round(calibration_error(own[reached], accepted[reached] > k), 4),
    }


def auc_error(confidence: NDArray[np.float64], outcome: NDArray[np.bool_], request: NDArray[np.int64]) -> float:
    """Standard error of the AUC, by resampling requests: rows of one answer are not independent."""
    names, at = np.unique(request, return_inverse=True)
    draws = np.random.default_rng(0).integers(len(names), size=(RESAMPLES, len(names)))
    weights = (np.bincount(draw, minlength=len(names))[at] for draw in draws)
    return float(np.nanstd([auc(confidence, outcome, weight) for weight in weights]))


def switch(trace: Trace, domains: dict[str, list[Step]]) -> dict[str, Any]:
    """Calibration error of acceptance in windows of WINDOW steps, from a cold start: code, then chat, then the rest.

    Of the estimator as it learns, of one that stops learning at the first switch, and of a head with its correction.
    Requests of two domains never share a step, so the order in which they were recorded does not matter.
    """
    series: dict[str, Any] = {}
    replays = {"online": Replay(trace, HEADLESS, learns=True), "stopped": Replay(trace, HEADLESS, learns=True)}
    if set(HEAD.shown) <= set(trace.features):
        replays["head online"] = Replay(trace, HEAD, learns=True)
    for domain in sorted(domains, key=lambda name: (name != "code", name != "chat")):
        steps, rows = domains[domain], []
        for at in range(0, len(steps) - WINDOW + 1, WINDOW):
            window = steps[at : at + WINDOW]
            said: dict[str, list[NDArray[np.float64]]] = {name: [] for name in replays}
            for step in window:
                for name, replay in replays.items():
                    said[name].append(replay.confidence(step))
                    replay.learn(step)
            records = np.concatenate([step.records for step in window])
            seen = np.arange(trace.gamma) < np.minimum(records["verified"], records["accepted"] + 1)[:, None]
            happened = (np.arange(trace.gamma) < records["accepted"][:, None])[seen]
            errors = {name: calibration_error(np.concatenate(c)[seen], happened) for name, c in said.items()}
            rows.append({"steps": at + WINDOW, **{name: round(error, 4) for name, error in errors.items()}})
        series[domain] = rows
        replays["stopped"].learns = False
    return series


def _figure(row: dict[str, float], name: str) -> str:
    return f"({row[name]:.3f})" if name in ("auc_error", "ece_accepted") else f"{row[name]:.3f}"


def show(result: dict[str, Any]) -> None:
    """Tables on stderr: AUC, calibration error, and calibration error over a change of domain."""
    console = Console(stderr=True, width=160)
    labels = list(result["domains"]["all"][RULES[0]][0])[2:]
    for title, *figures_of in (
        ("AUC of survival; in brackets its standard error", "auc", "auc_error"),
        ("AUC of acceptance given reached", "auc_accepted"),
        ("Calibration error of survival; in brackets, of acceptance given reached", "ece", "ece_accepted"),
    ):
        table = Table(title=title)
        for heading in ("domain", "rule", "position", "rows", "reached", *labels):
            table.add_column(heading, justify="left" if heading in ("domain", "rule") else "right")
        for domain, rules in result["domains"].items():
            for rule, positions in rules.items():
                for k, row in enumerate(positions):
                    if row:
                        table.add_row(
                            *(domain, rule, str(k + 1), str(row["rows"]), str(row["reached"])),
                            *(" ".join(_figure(row[label], name) for name in figures_of) for label in labels),
                        )
        console.print(table)
    table = Table(title=f"Calibration error of acceptance by {WINDOW} steps, domains one after the other from cold")
    names = {"online": "estimator", "stopped": "stopped after the first domain", "head online": "head, corrected"}
    shown = [name for name in names if name in next(iter(result["switch"].values()))[0]]
    for heading in ("domain", "steps", *(names[name] for name in shown)):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for domain, rows in result["switch"].items():
        for row in rows:
            table.add_row(domain, str(row["steps"]), *(f"{row[name]:.3f}" for name in shown))
    console.print(table)


if __name__ == "__main__":
    main()
