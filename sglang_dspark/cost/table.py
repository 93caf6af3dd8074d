"""The step cost table: what profiling found, as plain numbers that can be saved."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CostTable:
    """Seconds of a decode step, as terms that add up (design: fixed + draft(R, g) + verify(tier(tokens), R) + attention * kv).

    Every forward costs a fixed part, a part per request in it and, for the target, a part per token and per context token.
    """

    tokens: tuple[int, ...]  # measured token counts of the target forward, ascending
    seconds: tuple[float, ...]  # its time at each, without the per-request and context parts; non-decreasing
    per_request: float = 0.0  # target forward, seconds per request
    per_kv_token: float = 0.0  # target forward, seconds per token of context, all requests together
    draft_fixed: float = 0.0  # one draft forward
    draft_per_request: float = 0.0
    extend_fixed: float = 0.0  # the draft extend after each verify, at every depth
    extend_per_request: float = 0.0
    free_depth: int = 1  # depths that need no draft forward: an EAGLE chain's first position comes from the extend
    tiers: tuple[int, ...] | None = None  # captured token counts; None: no graphs, interpolate between measured counts

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.seconds):
            raise ValueError(
                f"A cost table needs one time for each token count, got {len(self.tokens)} counts and {len(self.seconds)} times."
            )
        if any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError(f"The token counts of a cost table must rise, got {list(self.tokens)}.")
        if min(self.seconds) <= 0:
            raise ValueError(f"The times of a cost table must be above 0 seconds, got {min(self.seconds)}.")
        if self.tiers is not None and list(self.tiers) != sorted(set(self.tiers)):
            raise ValueError(f"The graph tiers of a cost table must rise, got {list(self.tiers)}.")
