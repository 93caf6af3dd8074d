"""Pooled acceptance per draft position, conditional on being reached: what a request without a history counts as."""

import numpy as np
from numpy.typing import NDArray

# Start: a good chain draft's conditional acceptance, as the pull of this many observations. Deliberately on the high
# side: a start that is too low makes the planner draft nothing, and then nothing is ever observed.
START = 0.8
START_WEIGHT = 16.0
# Half of the weight is forgotten after this many observations of a position: a few seconds at 64 users.
HALF_LIFE = 4096.0


class PositionPrior:
    """Exponentially forgetting mean of acceptance at each of gamma positions, over censored observations."""

    def __init__(self, gamma: int, half_life: float = HALF_LIFE) -> None:
        self.gamma = gamma
        self._log_keep = -np.log(2.0) / half_life
        self._seen = np.full(gamma, START_WEIGHT)
        self._accepted = np.full(gamma, START_WEIGHT * START)

    def observe(self, accepted: NDArray[np.integer], verified: NDArray[np.integer]) -> None:
        """Counts a step: draft tokens accepted and verified of each request, both [R], bonus and anchor excluded.

        Position k (from 1) was seen only where k <= verified and k <= accepted + 1.
        """
        k = np.arange(1, self.gamma + 1)
        seen = (k <= np.minimum(verified, accepted + 1)[:, None]).sum(axis=0)
        taken = (k <= np.minimum(verified, accepted)[:, None]).sum(axis=0)
        keep = np.exp(self._log_keep * seen)
        self._seen = self._seen * keep + seen
        self._accepted = self._accepted * keep + taken

    def values(self) -> NDArray[np.float32]:
        """P(position accepted | reached), [gamma] float32."""
        return (self._accepted / self._seen).astype(np.float32)
