"""Predicts the seconds of a decode step from a cost table: staircase or piecewise linear in tokens, linear past the end."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.cost.table import CostTable

Tokens = NDArray[np.int64]
Seconds = NDArray[np.float64]


def verify_curve(table: CostTable, tokens: Tokens) -> Seconds:
    """The token part of the target forward [..] seconds: at the tier above where graphs exist, else interpolated."""
    x, y = np.asarray(table.tokens, float), np.asarray(table.seconds, float)
    at = np.asarray(tokens, float)
    if table.tiers:
        tiers = np.asarray(table.tiers, float)
        at = np.where(at <= tiers[-1], tiers[np.minimum(np.searchsorted(tiers, at), len(tiers) - 1)], at)
    slope = (y[-1] - y[0]) / (x[-1] - x[0]) if len(x) > 1 else y[0] / x[0]
    if len(x) > 1:
        # Past the end the last segment's slope holds, but never below the mean slope: a flat end must not price tokens at nothing.
        slope = max(slope, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    return np.interp(at, x, y) + np.maximum(at - x[-1], 0.0) * slope


class CostModel:
    """Step times of one deployment."""

    def __init__(self, table: CostTable) -> None:
        self.table = table

    def step_time(
        self, requests: int, depth: int, tokens: Tokens, kv_tokens: int, prefill_tokens: int = 0
    ) -> Seconds:
        """Seconds of a step for each count in tokens (R + B, prefill excluded), float64 of its shape.

        kv_tokens: context of all requests together. prefill_tokens: tokens of prefill chunks in the same forward.
        """
        table = self.table
        forwards = max(depth - table.free_depth, 0)
        fixed = (
            table.per_request * requests
            + table.per_kv_token * kv_tokens
            + forwards * (table.draft_fixed + table.draft_per_request * requests)
            + table.extend_fixed
            + table.extend_per_request * requests
        )
        return fixed + verify_curve(table, np.asarray(tokens) + prefill_tokens)

    def bind(self, requests: int, kv_tokens: int, prefill_tokens: int = 0) -> Callable[[int, Tokens], Seconds]:
        """step_time with the batch fixed: what the planner calls with (depth, tokens)."""
        return lambda depth, tokens: self.step_time(requests, depth, tokens, kv_tokens, prefill_tokens)
