"""How likely each draft token is to be accepted: sources, the estimator that corrects them, and the pooled prior."""

from sglang_dspark.confidence.calibration import Calibration, load_calibration
from sglang_dspark.confidence.estimator import Estimator, Rows
from sglang_dspark.confidence.features import FEATURES, draft_features
from sglang_dspark.confidence.prior import PositionPrior
from sglang_dspark.confidence.source import HEAD, HEADLESS, NATIVE, RULES, Source, source_of

__all__ = [
    "FEATURES",
    "HEAD",
    "HEADLESS",
    "NATIVE",
    "RULES",
    "Calibration",
    "Estimator",
    "PositionPrior",
    "Rows",
    "Source",
    "draft_features",
    "load_calibration",
    "source_of",
]
