"""What a decode step costs: measured, fitted, corrected while serving, saved."""

from sglang_dspark.cost.model import CostModel
from sglang_dspark.cost.table import CostTable

__all__ = ["CostModel", "CostTable"]
