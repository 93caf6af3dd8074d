"""Corrects the cost curve from realised step times: a bounded factor per region of token counts, smooth between."""

import numpy as np
from numpy.typing import NDArray

# A region is a doubling of the token count: 1, 2-3, 4-7, ... up to 2^17, above 4096 requests of 17 tokens.
REGIONS = 18
# One step corrects this share of its error, half of it everywhere and half of it in its region, and an error counts as
# at most double or half: a stall of a hundred steps' length (a paused process) then weighs no more than a slow step.
RATE = 0.05
STEP_CLAMP = np.log(2.0)
# A profile that is wrong by more than this is not corrected but wrong; the guard handles it.
FACTOR_CLAMP = np.log(4.0)


class OnlineCorrection:
    """Multiplicative corrections in the log domain: one of the whole step, and one more for each region of its curve.

    What is wrong everywhere, such as a machine that runs hot, is learnt from every step, for all regions at once.
    """

    def __init__(self) -> None:
        self._regions = np.zeros(REGIONS)
        self._common = 0.0

    def observe(self, tokens: int, predicted: float, realised: float) -> None:
        """Learns from one step: its tokens, the corrected prediction it was planned with, the seconds it took."""
        if not (predicted > 0 and realised > 0 and np.isfinite(predicted) and np.isfinite(realised)) or tokens < 1:
            return
        error = RATE / 2 * float(np.clip(np.log(realised / predicted), -STEP_CLAMP, STEP_CLAMP))
        at = min(np.log2(tokens), REGIONS - 1.0)
        below = int(at)
        for region, share in ((below, 1.0 - (at - below)), (below + 1, at - below)):
            if region < REGIONS:
                self._regions[region] += share * error
        np.clip(self._regions, -FACTOR_CLAMP, FACTOR_CLAMP, out=self._regions)
        self._common = float(np.clip(self._common + error, -FACTOR_CLAMP, FACTOR_CLAMP))

    @property
    def state(self) -> NDArray[np.float64]:
        """A copy of all log factors, [REGIONS + 1]: tells whether curves derived earlier are still good."""
        return np.append(self._regions, self._common)

    def common(self) -> float:
        """The factor of the parts that do not depend on tokens."""
        return float(np.exp(self._common))

    def curve(self, tokens: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Corrects a non-decreasing curve, [n] seconds at ascending token counts [n], and keeps it non-decreasing."""
        at = np.log2(np.maximum(tokens, 1))
        correction = self._common + np.interp(at, np.arange(REGIONS), self._regions)
        factor = np.exp(np.clip(correction, -FACTOR_CLAMP, FACTOR_CLAMP))
        return np.maximum.accumulate(seconds * factor)
