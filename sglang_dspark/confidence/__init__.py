"""How likely each draft token is to be accepted: the pooled prior and the head-less estimator."""

from sglang_dspark.confidence.estimator import RULES, DraftConfidence, evaluate
from sglang_dspark.confidence.prior import PositionPrior

__all__ = ["RULES", "DraftConfidence", "PositionPrior", "evaluate"]
