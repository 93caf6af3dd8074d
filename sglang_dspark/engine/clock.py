"""How long a decode step took, where that can be told from the host."""

from __future__ import annotations

from collections import deque

MOST_HOST_SHARE = 0.3  # of a step's time; a longer gap before it was a prefill or a wait for requests


class StepClock:
    """Times steps in seconds, with the host's work since the step before. On a CPU a step ends when its call does. On a
    device its end is seen when its outcome arrives: it took the time since the arrival before if it was launched by
    then, as under the overlap schedule, or since its launch."""

    def __init__(self) -> None:
        self._ended = self._arrived = float("-inf")
        # Bounded, as an outcome that never comes takes none out; with overlap two steps are under way.
        self._launched: deque[float] = deque(maxlen=8)
        self._interrupted = False

    def starts(self, now: float) -> None:
        """A decode step is launched."""
        self._launched.append(float("inf") if self._interrupted else now)
        if self._interrupted:  # however short it was, what lies between the two steps is not this one's host work
            self._ended = float("-inf")
        self._interrupted, self._started = False, now

    def interrupted(self) -> None:
        """Something that is no decode step is launched: the time until the next step's end is not that step's."""
        self._interrupted = True

    def ends(self, now: float) -> float:
        """The call of the step that was started last ended, and the step with it: seconds it took."""
        self._launched.clear()
        before, self._ended = self._ended, now
        return _took(before, self._started, now)

    def arrives(self, now: float) -> float | None:
        """The outcome of the oldest step that was not seen to end: seconds it took; None where that cannot be told."""
        before, self._arrived = self._arrived, now
        launched = self._launched.popleft() if self._launched else float("inf")
        # With overlap an outcome is taken after the next launch. Where that was a prefill, the host was busy with it,
        # however long since the step has ended.
        if self._interrupted or launched == float("inf") or before == float("-inf"):
            return None
        return _took(before, launched, now)


def _took(before: float, launched: float, now: float) -> float:
    took, between = now - launched, launched - before
    return now - before if between < MOST_HOST_SHARE * took else took
