"""Decides when the draft model rests: no forward of it at all, while drafting would not pay anyway."""

# By how many the steps that a resting draft would beat must outnumber the others before it rests: one odd step must not
# cool it down, and steps that alternate must not keep it warm for less than a rest would give.
PATIENCE = 8
# Steps of the first rest, and of the longest. A rest that ends in vain doubles the next one, so that a draft that never
# pays costs PATIENCE extends in every LONGEST steps.
SHORTEST, LONGEST = 16, 512
# A batch that changed by a quarter since the rest began is another load, and worth asking again at once.
OTHER_LOAD = 0.25


class DraftRest:
    """Whether the step keeps the draft model warm (its extend runs, so the next step can draft) or lets it rest.

    A resting draft misses the tokens of the rest in its KV; it may draft worse for requests that lived through one, or
    that find its text in the prefix cache, and stays exact, as any draft does. Prompts never miss: their pass through
    the draft is not left out in a rest, since drafts without it lose much (SmolLM2, greedy: 1.85 tokens a step in place
    of 2.10) and a cached prompt is shared for long. Memory: a few numbers.
    """

    def __init__(self) -> None:
        self.resting = False
        self.rests = 0
        """How often a rest began."""
        self._idle = 0
        self._rested = 0
        self._length = SHORTEST
        self._load = 0

    def step(self, pays: bool, requests: int) -> bool:
        """Whether this step may draft, given whether drafting beats a resting draft, and the batch's size.

        Not while resting, nor in the step that ends a rest, whose extend prepares the next step's draft.
        """
        if self.resting:
            self._rested += 1
            over = self._rested >= self._length or abs(requests - self._load) > OTHER_LOAD * self._load
            if pays and over:
                self.wake()
            return False
        if pays:
            if self._idle == 0:
                self._length = SHORTEST  # drafting is the rule: the last rest did not end in vain
            self._idle = max(self._idle - 1, 0)
            return True
        self._idle += 1
        if self._idle > PATIENCE:
            self.resting, self.rests, self._rested, self._load = True, self.rests + 1, 0, requests
        return not self.resting

    def wake(self) -> None:
        """End a rest: from the next step on the draft can be used."""
        if self.resting:
            self.resting, self._idle = False, PATIENCE - 1  # if it was in vain, the next rest begins soon
            self._length = min(2 * self._length, LONGEST)
