"""What scheduling adds to a decode step: host time by part, launches and bytes, with and without metrics and trace.

    python -m benchmarks.overhead

No server and no model: the scheduler is driven with made-up drafts and outcomes. Host time is that of this thread, in
microseconds, the median over turns of steps that go on learning. Launches are the tensor operations between draft and
verify, each of which is a kernel on a GPU, and one for the allocation, which is a kernel there. Bytes are what a step
would send to a device and read back from it. Not in it: the ragged rows and the plan's broadcast between ranks.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import timing
from benchmarks.plan import cost_table
from sglang_dspark.confidence import HEADLESS, RULES
from sglang_dspark.cost import CostModel
from sglang_dspark.observe import TraceWriter
from sglang_dspark.observe.metrics import StepMetrics

CASES = ((8, 5), (64, 7), (256, 7))
BATCHES = 10  # made-up drafts in turn, so that the branch predictor does not learn one
TRACE_BYTES = 1 << 30  # never full in a run of this length
LABELS = {"model_name": "model", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
PARTS = ("plan", "confidence", "allocate", "note", "learn", "metrics")
ALLOCATION_LAUNCHES = 1  # kernels/allocate_triton.py; a CPU takes another way, without tensor operations


class Parts:
    """Microseconds of each part of the steps in a turn."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.spent[name] += (time.thread_time() - start) * 1e6


class Steps:
    """A scheduler that plans, allocates and learns as it does in a server, of `requests` requests that never end."""

    def __init__(self, requests: int, gamma: int, metrics: StepMetrics | None, trace: TraceWriter | None) -> None:
        from sglang_dspark.engine.scheduler import StepBatch, StepScheduler

        self.rng = np.random.default_rng(requests)
        self.scheduler = StepScheduler(requests, gamma)
        self.scheduler.cost = CostModel(cost_table(requests, gamma), max_depth=gamma)
        self.scheduler.trace = trace
        self.metrics = metrics
        rows = np.arange(requests)
        self.batch = StepBatch(rows, np.ones_like(rows), rows % 2, np.ones(requests, bool), 1000 * requests)
        chances = [
            self.rng.beta(4 * self.rng.random((requests, 1)) + 0.5, 1, (requests, gamma)) for _ in range(BATCHES)
        ]
        self.drafts = [(chance, shown_at(chance)) for chance in chances]

    def step(self, number: int, parts: Parts) -> None:
        """One decode step."""
        it, (chance, whole) = self.scheduler, self.drafts[number % BATCHES]
        with parts.part("plan"):
            plan = it.plan(self.batch, whole[:, 0])
        shown = whole[:, : plan.depth]
        with parts.part("confidence"):
            confidence = it.confidence(shown, self.batch)
        with parts.part("allocate"):
            lens = it.allocate(plan, confidence)
        tokens = int(lens.sum())
        with parts.part("note"):
            sent = it.launched(self.batch, plan, shown, confidence, tokens)
        verified = lens.numpy().astype(np.int64) - 1
        accepted = np.minimum((self.rng.random(chance.shape) < chance).cumprod(axis=1).sum(axis=1), verified)
        with parts.part("learn"):
            it.timed(sent, plan.step_time)
            settled = it.settle(sent, accepted.astype(np.int64), verified)
        if self.metrics is not None:
            with parts.part("metrics"):
                self.metrics.planned(plan.mode, plan.depth, plan.budget, False, 1e-4)
                self.metrics.timed(plan.step_time, plan.step_time)
                rows = (verified, accepted, settled.confidence, settled.alive)
                self.metrics.settled(plan.depth, *rows, tokens=tokens, tau=plan.tau)


def shown_at(chance: np.ndarray) -> torch.Tensor:
    """[R, gamma, features] that the estimator reads the chance from, with the other features at random."""
    features = np.random.default_rng(0).random((*chance.shape, len(HEADLESS.shown)), np.float32)
    kept = np.clip(chance, 1e-4, 1 - 1e-4)
    features[..., 0] = np.log(kept / (1 - kept))
    return torch.from_numpy(features)


class Operations(TorchDispatchMode):
    """Counts tensor operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [result.alias_info for result in function._schema.returns]
        self.count += not any(alias is not None and not alias.is_write for alias in aliases)
        return function(*args, **(kwargs or {}))


class Moves(TorchFunctionMode):
    """Bytes of the tensors that would move, were the draft's on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = self.to_host = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "to":
            self.to_device += args[0].nbytes
        elif name in ("cpu", "copy_"):
            self.to_host += args[-1].nbytes
        return function(*args, **(kwargs or {}))


def case(requests: int, gamma: int, folder: Path) -> dict[str, Any]:
    """Medians of one shape, and counts of one step of it after many."""
    metrics = StepMetrics(LABELS, gamma, registry=CollectorRegistry())
    trace = TraceWriter(folder / f"{requests}x{gamma}", gamma, HEADLESS.shown, RULES, TRACE_BYTES)
    bare, whole = Steps(requests, gamma, None, None), Steps(requests, gamma, metrics, trace)
    numbers = count()

    def turn(steps: Steps) -> dict[str, float]:
        for _ in range(timing.WARM_UP):
            steps.step(next(numbers), Parts())
        parts = Parts()
        for _ in range(timing.CALLS):
            steps.step(next(numbers), parts)
        return {name: spent / timing.CALLS for name, spent in parts.spent.items()}

    turns = [(turn(bare), turn(whole)) for _ in range(timing.ROUNDS)]  # in turns: others' noise hits both alike
    alone, both = ({name: median(pair[i].get(name, 0.0) for pair in turns) for name in PARTS} for i in (0, 1))
    trace.close()
    with Operations() as operations:
        draft_to_verify(bare, next(numbers))
    with Moves() as moves:
        bare.step(next(numbers), Parts())
    return {
        "requests": requests,
        "gamma": gamma,
        **{f"{name}_us": round(alone[name], 1) for name in PARTS if name != "metrics"},
        "step_us": round(sum(alone.values()), 1),
        "metrics_us": round(both["metrics"], 1),
        "trace_us": round(median(traced["learn"] - plain["learn"] for plain, traced in turns), 1),
        "all_us": round(sum(both.values()), 1),
        "launches": operations.count + ALLOCATION_LAUNCHES,
        "to_device_bytes": moves.to_device,
        "to_host_bytes": moves.to_host,
        "trace_bytes": requests * trace.type.itemsize,
    }


def draft_to_verify(steps: Steps, number: int) -> None:
    """What the device does of ours between draft and verify, without the allocation."""
    shown = steps.drafts[number % BATCHES][1]
    steps.scheduler.confidence(shown, steps.batch)


def show(cases: list[dict[str, Any]], write: Callable[[str], None] = print) -> None:
    """The table that a person reads."""
    columns = [name for name in cases[0] if name not in ("requests", "gamma")]
    heads = ["R x gamma", *(name.removesuffix("_us").replace("_", " ") for name in columns)]
    widths = [max(len(head), 7) for head in heads]
    write("  ".join(head.rjust(width) for head, width in zip(heads, widths, strict=True)))
    for found in cases:
        cells = [f"{found['requests']}x{found['gamma']}", *(str(found[name]) for name in columns)]
        write("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


def main() -> None:
    timing.make_sglang_importable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = [case(requests, gamma, Path(folder)) for requests, gamma in CASES]
    show(cases)
    print(json.dumps({"cases": cases}))


if __name__ == "__main__":
    main()
