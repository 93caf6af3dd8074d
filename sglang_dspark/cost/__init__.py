"""What a decode step costs: measured, fitted, corrected while serving, saved."""

from sglang_dspark.cost.fit import Sample, fit_table
from sglang_dspark.cost.grid import Point, profile_grid
from sglang_dspark.cost.model import BoundCost, CostModel
from sglang_dspark.cost.online import OnlineCorrection
from sglang_dspark.cost.sps import load_sps_table
from sglang_dspark.cost.store import CostKey, load_table, read_table, save_table
from sglang_dspark.cost.table import CostTable

__all__ = [
    "BoundCost",
    "CostKey",
    "CostModel",
    "CostTable",
    "OnlineCorrection",
    "Point",
    "Sample",
    "fit_table",
    "load_sps_table",
    "load_table",
    "profile_grid",
    "read_table",
    "save_table",
]
