"""Faults planted in a serving scheduler, through DSPARK_POLICY: each part of ours fails now and then, by chance."""

import functools
import os
import random
from pathlib import Path

import torch

from sglang_dspark.engine.policy import Policy
from sglang_dspark.observe.metrics import StepMetrics

RATE = 0.02  # of calls; steps at which something fails are then about one in six
random = random.Random(1)


class Planted(RuntimeError):
    """Raised by no code but this."""


class Chaos(Policy):
    """The scheduler's own decisions, among failures. Each is noted in the file named by TEST_FAULTS_FILE, one a line.

    Plan, allocation, history, learning, timing, trace and metrics raise; the confidence is garbage in places, which
    must not be a fault at all.
    """

    def __init__(self, scheduler):
        super().__init__(scheduler)
        self.file = Path(os.environ["TEST_FAULTS_FILE"]).open("a", buffering=1)  # noqa: SIM115 (as long as the server)
        for part, name in (("history", "launched"), ("learning", "settle"), ("timing", "timed")):
            setattr(scheduler, name, self.failing(part, getattr(scheduler, name)))
        if scheduler.trace is not None:  # written while learning
            scheduler.trace.write = self.failing("learning", scheduler.trace.write)
        for name in ("planned", "settled", "timed"):
            setattr(StepMetrics, name, self.failing("metrics", getattr(StepMetrics, name)))
        self.plan = self.failing("plan", self.plan)
        self.allocate = self.failing("allocation", self.allocate)
        scheduler.confidence = self.garbling(scheduler.confidence)

    def failing(self, part, action):
        @functools.wraps(action)
        def perhaps(*args, **kwargs):
            if random.random() < RATE:
                self.file.write(part + "\n")
                raise Planted(part)
            return action(*args, **kwargs)

        return perhaps

    def garbling(self, action):
        def perhaps(*args, **kwargs):
            confidence = action(*args, **kwargs)
            if random.random() < RATE:
                odd = torch.tensor([float("nan"), float("inf"), -1.0, 2.0])
                confidence[random.randrange(len(confidence))] = odd[torch.randint(4, confidence.shape[1:])]
            return confidence

        return perhaps
