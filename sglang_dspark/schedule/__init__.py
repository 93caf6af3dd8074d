"""Pure decisions of a step: what survives, how deep to draft, how many tokens to verify."""

from sglang_dspark.schedule.budget import (
    MIN_GAIN,
    Plan,
    budget_from_survival,
    joint_from_survival,
    plan_budget,
    plan_causal,
    plan_joint,
)
from sglang_dspark.schedule.history import ConfidenceHistory
from sglang_dspark.schedule.rest import DraftRest
from sglang_dspark.schedule.survival import sanitise, survival

__all__ = [
    "MIN_GAIN",
    "ConfidenceHistory",
    "DraftRest",
    "Plan",
    "budget_from_survival",
    "joint_from_survival",
    "plan_budget",
    "plan_causal",
    "plan_joint",
    "sanitise",
    "survival",
]
