"""Medians of short calls, measured in turns so that whatever else the machine does hits all of them alike."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from statistics import median
from typing import Any

import torch

from sglang_dspark.engine import cpu

ROUNDS = 100  # medians of this many settle within about two percent on a quiet machine
WARM_UP, CALLS = 5, 10  # of one turn: the first refill caches, the others are short against a time slice


def make_sglang_importable() -> None:
    """Where there is no GPU, SGLang's modules import only with its CPU engine's operations, native or our stand-ins."""
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        cpu.install()


def on_each(batches: Sequence[Any], call: Callable[[Any], object]) -> Callable[[], object]:
    """A function that calls with the next batch each time: on one and the same, the branch predictor learns a sort."""
    turn = cycle(batches)
    return lambda: call(next(turn))


def medians(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of each call, host time of this thread."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for _ in range(WARM_UP):
                call()
            # Time of the thread and not of the clock: what other processes take is not the code's.
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            taken[name].append((time.thread_time() - start) / CALLS * 1e6)
    return {name: median(times) for name, times in taken.items()}
