"""Corrects the cost curve from realised step times: bounded factors at knots along the token counts, smooth between.

Plans go where a profile's errors make a count look cheap. So what they run must be corrected where it lies, more than
elsewhere, or the next plan goes there again.
"""

import numpy as np
from numpy.typing import NDArray

# Token counts from 1 to 2^17, above 4096 requests of 17 tokens, and the knots in each doubling: what is wrong with a
# stretch of the curve is learnt from every step on it, and what is wrong with a count from the steps near it. In
# simulated servers with a profile whose points were 12% off, each by itself, plans gave over steps 75 to 300 with one
# knot in a doubling 98.0% (8 requests) and 98.0% (32) of what true times would have given, with both 98.8 and 98.4%;
# with four alone 98.8 and 98.7%, but there half as much of a stretch that was 40% off was found in 1500 steps.
DOUBLINGS = 17
PER_DOUBLING = (1, 4)
# One step corrects this share of its error everywhere, and as much at its knots of either kind. An error counts as at
# most half as long again, or that much less: a stall of a hundred steps' length (a paused process) then weighs no more
# than a slow step.
RATE = 0.05
STEP_CLAMP = np.log(1.5)
# A profile that is wrong by more than this is not corrected but wrong; the guard handles it.
FACTOR_CLAMP = np.log(4.0)


class OnlineCorrection:
    """Multiplicative corrections in the log domain: one of the whole step, and those of the knots of its curve.

    What is wrong everywhere, such as a machine that runs hot, is learnt from every step, for all counts at once.
    """

    def __init__(self) -> None:
        self._knots = [np.zeros(per * DOUBLINGS + 1) for per in PER_DOUBLING]
        self._common = 0.0

    def observe(self, tokens: int, predicted: float, realised: float) -> None:
        """Learns from one step: its tokens, the corrected prediction it was planned with, the seconds it took."""
        if not (predicted > 0 and realised > 0 and np.isfinite(predicted) and np.isfinite(realised)) or tokens < 1:
            return
        error = RATE * float(np.clip(np.log(realised / predicted), -STEP_CLAMP, STEP_CLAMP))
        for per, knots in zip(PER_DOUBLING, self._knots, strict=True):
            at = min(per * np.log2(tokens), len(knots) - 1.0)
            below = min(int(at), len(knots) - 2)
            knots[below : below + 2] += error * np.array([1.0 - (at - below), at - below])
            np.clip(knots, -FACTOR_CLAMP, FACTOR_CLAMP, out=knots)
        self._common = float(np.clip(self._common + error, -FACTOR_CLAMP, FACTOR_CLAMP))

    @property
    def state(self) -> NDArray[np.float64]:
        """A copy of all log factors: tells whether curves derived earlier are still good."""
        return np.concatenate([*self._knots, [self._common]])

    def common(self) -> float:
        """The factor of the parts that do not depend on tokens."""
        return float(np.exp(self._common))

    def curve(self, tokens: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Corrects a non-decreasing curve, [n] seconds at ascending token counts [n], and keeps it non-decreasing."""
        fine = PER_DOUBLING[-1]
        grid = np.arange(fine * DOUBLINGS + 1)
        # Between its knots every part is a straight line over the finest ones, so the parts may be added there.
        parts = (
            np.interp(grid, np.arange(len(k)) * (fine // p), k) for p, k in zip(PER_DOUBLING, self._knots, strict=True)
        )
        correction = self._common + np.interp(fine * np.log2(np.maximum(tokens, 1)), grid, sum(parts))
        factor = np.exp(np.clip(correction, -FACTOR_CLAMP, FACTOR_CLAMP))
        return np.maximum.accumulate(seconds * factor)
