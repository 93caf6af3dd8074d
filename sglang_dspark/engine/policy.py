"""Who decides in a step: the scheduler, or what DSPARK_POLICY names in its place for an experiment or a test."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from sglang_dspark.config import Refusal
from sglang_dspark.engine.scheduler import StepBatch, StepScheduler
from sglang_dspark.schedule import Plan


class Policy:
    """The scheduler's decisions. A replacement subclasses it and is built the same way."""

    def __init__(self, scheduler: StepScheduler) -> None:
        self.scheduler = scheduler

    def plan(self, batch: StepBatch, first_shown: Tensor | None) -> Plan:
        """Depth and budget, before the step drafts. first_shown: see :meth:`StepScheduler.plan`."""
        return self.scheduler.plan(batch, first_shown)

    def split(self, plan: Plan, batch: StepBatch, shown: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        """The newest draft's confidence [R, gamma], and the lengths of :meth:`allocate` by what of it is of use.

        shown: see :meth:`StepScheduler.confidence`.
        """
        confidence = self.scheduler.confidence(shown, batch)
        return confidence, self.allocate(plan, self.scheduler.usable(confidence, plan, batch), draft)

    def allocate(self, plan: Plan, confidence: Tensor, draft: Tensor) -> Tensor:
        """verify_lens [R] int32, each from 1 to 1 + depth.

        confidence: [R, gamma]. draft: [R, depth] the drafted tokens, which no scheduler may look at where they were
        sampled; the one here does not look at all.
        """
        return self.scheduler.allocate(plan, confidence)


def load_policy(name: str | None, scheduler: StepScheduler) -> Policy:
    """The policy that DSPARK_POLICY names as ``module:class``, or the scheduler's own.

    Raises:
        Refusal: there is no such class.
    """
    if name is None:
        return Policy(scheduler)
    module, attribute = name.split(":")
    try:
        factory: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does as it is imported
        reason = " ".join(str(error).split())
        raise Refusal(f"DSPARK_POLICY={name!r} cannot be loaded ({reason}); unset it or name module:class.") from None
    return factory(scheduler)
