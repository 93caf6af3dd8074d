"""Predicts the seconds of a decode step: table, tiers and online correction together (design: cost model)."""

from bisect import bisect_left

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_dspark.cost.online import OnlineCorrection
from sglang_dspark.cost.table import CostTable

Ints = NDArray[np.int64]
Seconds = NDArray[np.float64]

# Curves are rebuilt once a correction has moved by one percent, not each step: less than what a timing can resolve.
_REBUILD = 0.01


def at_tier(table: CostTable, tokens: Ints) -> Ints:
    """What each token count is padded to: the tier above it; itself past the last tier and without tiers."""
    if not table.tiers:
        return tokens
    tiers = np.asarray(table.tiers)
    above = tiers[np.minimum(tiers.searchsorted(tokens), len(tiers) - 1)]
    return np.maximum(above, tokens)


def verify_curve(table: CostTable, tokens: Ints) -> Seconds:
    """The token part of the target forward, seconds for each token count.

    With tiers a count costs what the tier above it costs; without, times are interpolated between measured counts. Past
    the last one time goes on linearly, by the last segment's slope or the mean slope if that is steeper: a curve that
    happens to end flat must not make further tokens free.
    """
    x, y = np.asarray(table.tokens, np.float64), np.asarray(table.seconds, np.float64)
    slope = y[0] / x[0]
    if len(x) > 1:
        slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), (y[-1] - y[0]) / (x[-1] - x[0]))
    at = at_tier(table, np.asarray(tokens))
    return np.interp(at, x, y) + np.maximum(at - x[-1], 0.0) * slope


class BoundCost:
    """The cost model with a step's batch fixed: the planner's StepTime."""

    def __init__(self, offsets: Seconds, curve: Seconds, tiers: Ints, prefill_tokens: int) -> None:
        self._offsets = offsets
        self._curve = curve[prefill_tokens:]
        self._tiers = tiers - prefill_tokens
        self._sorted = self._tiers.tolist()  # searched faster than the array

    def __call__(self, depth: int | Ints, tokens: Ints) -> Seconds:
        """Seconds at a depth for each count of decode tokens R + B; an array of depths [d, 1] gives [d, n]."""
        return self._offsets.take(depth) + self._curve.take(tokens)

    def edges(self, first: int, last: int) -> Ints | None:
        """Counts of decode tokens in [first, last) that just fill a tier; None without tiers or past the last one."""
        low, high = bisect_left(self._sorted, first), bisect_left(self._sorted, last)
        return None if high == len(self._sorted) else self._tiers[low:high]


class CostModel:
    """Step times of one deployment, from its table and what steps really took."""

    def __init__(self, table: CostTable, max_depth: int = 16) -> None:
        self.table = table
        self.correction = OnlineCorrection()
        self._depths = np.arange(max_depth + 1)
        self._tiers = np.array(table.tiers or (), np.int64)
        self._padded = frozenset(table.padded or ())
        self._curve = np.zeros(0)
        self._built = self.correction.state

    def step_time(
        self, requests: int, depth: int, tokens: ArrayLike, kv_tokens: int, prefill_tokens: int = 0
    ) -> Seconds:
        """Seconds of a step for each count in tokens (R + B, prefill excluded), float64 of its shape.

        kv_tokens: context of all requests together. prefill_tokens: tokens of prefill chunks in the same forward.
        """
        counts = np.asarray(tokens, np.int64) + prefill_tokens
        offset = self._offsets(requests, kv_tokens, np.asarray(depth))
        return offset + self._tokens_curve(int(counts.max(initial=0)))[counts]

    def bind(self, requests: int, kv_tokens: int, prefill_tokens: int = 0, *, warm: bool = False) -> BoundCost:
        """step_time for one batch, up to max_depth drafts a request: what the planner calls with (depth, tokens).

        warm: a step without a draft runs the draft's extend all the same, so that the next one can draft.
        """
        most = requests * len(self._depths) + prefill_tokens
        offsets = self._offsets(requests, kv_tokens, self._depths)
        if warm:
            offsets[0] += self._extend(requests, 0) * self.correction.common()
        return BoundCost(offsets, self._tokens_curve(most), self._tiers, prefill_tokens)

    def padded(self, tokens: int) -> int | None:
        """What a forward of so many tokens outside of graphs is padded to; None where it is not."""
        return int(at_tier(self.table, np.asarray(tokens))) if tokens in self._padded else None

    def observe(self, tokens: int, predicted: float, realised: float) -> None:
        """Learns from a step: tokens of its target forward (prefill too), seconds planned and real."""
        self.correction.observe(int(at_tier(self.table, np.asarray(tokens))), predicted, realised)

    def _offsets(self, requests: int, kv_tokens: int, depth: Ints) -> Seconds:
        """Everything that does not depend on the tokens verified, for each depth."""
        table = self.table
        draft = table.draft_fixed + table.draft_per_request * requests
        drafting = table.draft_start + self._extend(requests, depth)
        seconds = (
            table.per_request * requests
            + table.per_kv_token * kv_tokens
            + np.where(depth > 0, drafting, 0.0)  # while the draft rests nothing of it runs, see DraftRest
            + np.maximum(depth - table.free_depth, 0) * draft
        )
        return seconds * self.correction.common()

    def _extend(self, requests: int, depth: Ints | int) -> Seconds:
        """The draft's extend after a verify of this depth's rows."""
        table = self.table
        return np.asarray(
            table.extend_fixed + requests * (table.extend_per_request + table.extend_per_token * (depth + 1))
        )

    def _tokens_curve(self, most: int) -> Seconds:
        """The corrected token curve for counts 0..most, kept until the correction moves or the range grows."""
        if most >= len(self._curve) or np.abs(self.correction.state - self._built).max() > _REBUILD:
            self._built = self.correction.state
            # Room to grow, so that a batch filling up one request at a time does not rebuild at each step.
            counts = np.arange(max(2 * most, 1024, len(self._curve) - 1) + 1)
            # A tier is corrected as a whole, so that its counts go on costing the same.
            self._curve = self.correction.curve(at_tier(self.table, counts), verify_curve(self.table, counts))
        return self._curve
