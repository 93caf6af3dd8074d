"""Where step time is a staircase without graphs, and which counts of tokens are worth padding to the stair's end.

Matrix products run in blocks of rows, and a count that leaves a part of a block takes slower code: SmolLM2-135M in
float32 on one CPU core takes 86 ms for 4 tokens, 98 for 2 and 119 for 3; beyond, 4k + 1 to 4k + 3 tokens take about as
long as 4k + 4.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Counts that are measured one by one, and the length of a pattern that is seen twice in their upper half.
WINDOW, PERIOD = 16, 4
# A stair ends at the last count that costs at most so much more than the others on it.
ROOM = 0.04
# A count is padded where that saves as much: about what two repeats of a forward can resolve.
GAIN = 0.02


class Padding(NamedTuple):
    """Counts of tokens, ascending."""

    tiers: tuple[int, ...]
    """Where stairs end."""
    padded: tuple[int, ...]
    """Those that are faster when padded to the tier above."""


def find_padding(seconds: Sequence[float], most: int) -> Padding | None:
    """Tiers up to at least ``most`` tokens; None where no count gains by padding.

    seconds: of forwards of 1, 2, 3, ... tokens, up to WINDOW of them. Beyond, a count is what both counts of the same
    remainder by PERIOD are that end the window: a pattern seen once may be chance.
    """
    ends = _ends(seconds)
    tier = {count: min(end for end in ends if end >= count) for count in range(1, len(seconds) + 1)}
    padded = {count for count, end in tier.items() if seconds[end - 1] < (1 - GAIN) * seconds[count - 1]}
    if not padded:
        return None
    if len(seconds) == WINDOW:
        seen = range(WINDOW - PERIOD + 1, WINDOW + 1)
        inside = {count % PERIOD for count in seen if count not in ends and count - PERIOD not in ends}
        dear = {count % PERIOD for count in seen if count in padded and count - PERIOD in padded}
        # One period more than asked for, so that every count up to `most` has a tier above it.
        beyond = range(WINDOW + 1, most + PERIOD + 1)
        ends |= {count for count in beyond if count % PERIOD not in inside}
        padded |= {count for count in beyond if count % PERIOD in dear}
    return Padding(tuple(sorted(ends)), tuple(sorted(padded)))


def _ends(seconds: Sequence[float]) -> set[int]:
    """Where the stairs of the measured counts end; none is longer than PERIOD."""
    end = len(seconds)
    ends = {end}
    for count in range(end - 1, 0, -1):
        if end - count >= PERIOD or seconds[end - 1] > (1 + ROOM) * seconds[count - 1]:
            end = count
            ends.add(end)
    return ends
