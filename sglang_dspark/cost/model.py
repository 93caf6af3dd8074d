"""Predicts the seconds of a decode step: table, tiers and online correction together (design: cost model)."""

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.cost.online import OnlineCorrection
from sglang_dspark.cost.table import CostTable

Tokens = NDArray[np.int64]
Seconds = NDArray[np.float64]

# Curves are rebuilt once a correction has moved by half a percent, not each step: far below what a timing can resolve.
_REBUILD = 0.005


def verify_curve(table: CostTable, tokens: Tokens) -> Seconds:
    """The token part of the target forward, seconds for each token count.

    With tiers a count costs what the tier above it costs; without, times are interpolated between measured counts. Past
    the last one time goes on linearly, by the last segment's slope or the mean slope if that is steeper: a curve that
    happens to end flat must not make further tokens free.
    """
    x, y = np.asarray(table.tokens, np.float64), np.asarray(table.seconds, np.float64)
    at = np.asarray(tokens, np.float64)
    if table.tiers:
        tiers = np.asarray(table.tiers, np.float64)
        at = np.where(at <= tiers[-1], tiers[np.minimum(np.searchsorted(tiers, at), len(tiers) - 1)], at)
    slope = y[0] / x[0]
    if len(x) > 1:
        slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), (y[-1] - y[0]) / (x[-1] - x[0]))
    return np.interp(at, x, y) + np.maximum(at - x[-1], 0.0) * slope


class BoundCost:
    """The cost model with a step's batch fixed: what the planner asks, once per depth or once for all of them."""

    def __init__(self, offsets: Seconds, curve: Seconds, prefill_tokens: int) -> None:
        self._offsets = offsets
        self._curve = curve
        self._prefill = prefill_tokens

    def __call__(self, depth: int, tokens: Tokens) -> Seconds:
        """Seconds at a depth for each count of decode tokens R + B."""
        return self._curve[np.asarray(tokens) + self._prefill] + self._offsets[depth]

    def parts(self, first: int, count: int) -> tuple[Seconds, Seconds]:
        """The same as a sum: seconds by depth [max depth + 1], and by decode tokens from `first` on [count]."""
        start = first + self._prefill
        return self._offsets, self._curve[start : start + count]


class CostModel:
    """Step times of one deployment, from its table and what steps really took."""

    def __init__(self, table: CostTable, max_depth: int = 16) -> None:
        self.table = table
        self.correction = OnlineCorrection()
        self._depths = np.arange(max_depth + 1)
        self._curve = np.zeros(0)
        self._built = self.correction.state

    def step_time(self, requests: int, depth: int, tokens: Tokens, kv_tokens: int, prefill_tokens: int = 0) -> Seconds:
        """Seconds of a step for each count in tokens (R + B, prefill excluded), float64 of its shape.

        kv_tokens: context of all requests together. prefill_tokens: tokens of prefill chunks in the same forward.
        """
        counts = np.asarray(tokens, np.int64) + prefill_tokens
        offset = self._offsets(requests, kv_tokens, np.asarray(depth))
        return offset + self._tokens_curve(int(counts.max(initial=0)))[counts]

    def bind(self, requests: int, kv_tokens: int, prefill_tokens: int = 0) -> BoundCost:
        """step_time for one batch: the planner's callable of (depth, tokens), for up to max_depth drafts a request."""
        most = requests * len(self._depths) + prefill_tokens
        return BoundCost(self._offsets(requests, kv_tokens, self._depths), self._tokens_curve(most), prefill_tokens)

    def observe(self, tokens: int, predicted: float, realised: float) -> None:
        """Corrects later predictions by one step: tokens of its target forward (prefill too), seconds planned and real."""
        self.correction.observe(tokens, predicted, realised)

    def _offsets(self, requests: int, kv_tokens: int, depth: NDArray[np.int64]) -> Seconds:
        """Everything that does not depend on the tokens verified, for each depth."""
        table = self.table
        draft = table.draft_fixed + table.draft_per_request * requests
        extend = table.extend_fixed + requests * (table.extend_per_request + table.extend_per_token * (depth + 1))
        seconds = (
            table.per_request * requests
            + table.per_kv_token * kv_tokens
            + np.where(depth > 0, table.draft_start, 0.0)
            + np.maximum(depth - table.free_depth, 0) * draft
            + extend
        )
        return seconds * self.correction.common()

    def _tokens_curve(self, most: int) -> Seconds:
        """The corrected token curve for counts 0..most at least, kept until the correction moves or the range grows."""
        if most >= len(self._curve) or np.abs(self.correction.state - self._built).max() > _REBUILD:
            self._built = self.correction.state
            # Room to grow, so that a batch filling up one request at a time does not rebuild at each step.
            counts = np.arange(max(2 * most, 1024, len(self._curve) - 1) + 1)
            self._curve = self.correction.curve(verify_curve(self.table, counts))
        return self._curve
