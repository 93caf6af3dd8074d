"""Pure decisions of a step: what survives, how deep to draft, how many tokens to verify."""

from sglang_dspark.schedule.budget import (
    MIN_GAIN,
    Plan,
    budget_from_survival,
    joint_from_survival,
    plan_budget,
    plan_causal,
    plan_joint,
    plan_simple,
)
from sglang_dspark.schedule.guard import Guard, Switch
from sglang_dspark.schedule.history import ConfidenceHistory
from sglang_dspark.schedule.rest import DraftRest
from sglang_dspark.schedule.survival import sanitise, survival

__all__ = [
    "MIN_GAIN",
    "ConfidenceHistory",
    "DraftRest",
    "Guard",
    "Plan",
    "Switch",
    "budget_from_survival",
    "joint_from_survival",
    "plan_budget",
    "plan_causal",
    "plan_joint",
    "plan_simple",
    "sanitise",
    "survival",
]
