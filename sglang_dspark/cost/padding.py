"""Token counts that are worth padding to without graphs: where a forward of more tokens is measured to be faster.

Matrix products run in blocks of rows, and a count that leaves half a block takes slower code: SmolLM2-135M in float32
on one CPU core takes 61 ms for 4 tokens, 75 for 2 and 93 for 3; beyond, 4k + 3 tokens take 8 ms more than 4k + 4.
"""

from collections.abc import Sequence

# Counts that are measured one by one, and the length of a pattern that is seen twice in their upper half.
WINDOW, PERIOD = 16, 4
# A count that is dearer by less than this stays as it is: about what three repeats of a forward can resolve.
GAIN = 0.02


def counts_to_pad_to(seconds: Sequence[float], most: int) -> tuple[int, ...] | None:
    """The counts from 1 to at least ``most`` that no larger one undercuts; None where that is all of them.

    seconds: of forwards of 1, 2, 3, ... tokens, up to WINDOW of them. Beyond, a count is passed over where the two
    counts of the same remainder by PERIOD that end the window both are: padding by up to 3 tokens in 17 on a pattern
    seen once could cost more than it gains.
    """
    measured = len(seconds)
    kept = [all(later >= (1 - GAIN) * mine for later in seconds[at:]) for at, mine in enumerate(seconds, 1)]
    if all(kept):
        return None
    if measured >= WINDOW:
        last, before = kept[WINDOW - PERIOD : WINDOW], kept[WINDOW - 2 * PERIOD : WINDOW - PERIOD]
        pattern = [a or b for a, b in zip(last, before, strict=True)]
        # One period more than asked for, so that every count up to `most` has one above it.
        kept += [pattern[(at - 1) % PERIOD] for at in range(measured + 1, most + PERIOD + 1)]
    return tuple(at for at, keep in enumerate(kept, 1) if keep)
