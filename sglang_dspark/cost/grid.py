"""Which forwards to time at start-up: enough points to tell every cost term apart, the most telling ones first."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sglang_dspark.cost.fit import Kind
from sglang_dspark.cost.padding import WINDOW


class Point(NamedTuple):
    """One forward to time, several repeats of it; its Sample takes kind, requests, tokens and kv_tokens from here."""

    kind: Kind
    requests: int
    depth: int  # draft depth it belongs to
    tokens: int  # as in Sample
    context: int  # tokens of context per request

    @property
    def kv_tokens(self) -> int:
        return self.requests * self.context


def profile_grid(
    *,
    max_requests: int,
    max_depth: int,
    contexts: Sequence[int],
    max_kv_tokens: int,
    tiers: Sequence[int] | None = None,
    free_depth: int = 1,
    padding: bool = False,
) -> list[Point]:
    """Points in the order to measure, so that a time limit cuts the least telling ones.

    The corners come first (one request and all, nothing and everything drafted), then what tells requests from tokens,
    the draft, the contexts, and the counts between by halving. With tiers (CUDA graphs) every tier is a token count to
    measure; without, the counts double. padding: the first WINDOW counts are measured one by one, for
    find_padding, and more of those beyond. contexts: per-request context lengths, shortest first; a point that does not
    fit into max_kv_tokens takes a shorter one.
    """
    if max_requests < 1 or max_depth < 1 or not contexts:
        raise ValueError(
            "A profile needs requests, depth and contexts of 1 or more, "
            f"got {max_requests}, {max_depth}, {list(contexts)}."
        )

    def point(kind: Kind, requests: int, depth: int, tokens: int, context: int) -> Point:
        room = max_kv_tokens // requests - (depth + 1)
        return Point(kind, requests, depth, tokens, max(min(context, room), 1))

    short, long = contexts[0], contexts[-1]
    sizes = _outside_in(_doubling(max_requests))
    points: list[Point] = []
    for requests in sizes[:2]:
        for depth in (0, max_depth):
            points.append(point("verify", requests, depth, requests * (depth + 1), short))
    fewest = _extremes(max_requests, max_requests, max_depth)[0]
    points.append(point("verify", fewest, -(-max_requests // fewest) - 1, max_requests, short))
    for requests in sizes[:3]:
        for depth in sorted({free_depth, max_depth}):
            points.append(point("draft", requests, depth, requests * max(depth - free_depth, 0), short))
        for depth in (0, max_depth):
            points.append(point("extend", requests, depth, requests * (depth + 1), short))
    most = max_requests * (max_depth + 1)
    if padding:
        for tokens in range(1, min(WINDOW, most) + 1):
            requests = _extremes(tokens, max_requests, max_depth)[0]
            points.append(point("verify", requests, -(-tokens // requests) - 1, tokens, short))
    for context in (long, *contexts[1:-1]):
        for requests in sizes[:2]:
            # Of the largest batch nothing but anchors: with all drafts it may take as long as ten other points.
            depth = 0 if requests == max_requests > 1 else max_depth
            points.append(point("verify", requests, depth, requests * (depth + 1), context))
    counts = _outside_in([min(t, most) for t in tiers] if tiers else _doubling(most))
    for tokens in (*counts, *(_quarters(most) if padding else ())):
        requests = _extremes(tokens, max_requests, max_depth)[0]
        points.append(point("verify", requests, -(-tokens // requests) - 1, tokens, short))
    for tokens in counts:
        requests = _extremes(tokens, max_requests, max_depth)[-1]
        points.append(point("verify", requests, -(-tokens // requests) - 1, tokens, short))
    for requests in sizes[2:]:
        points.append(point("verify", requests, max_depth, requests * (max_depth + 1), short))
    return list(dict.fromkeys(points))


def _doubling(limit: int) -> Iterator[int]:
    """1, 2, 4, ... and the limit itself."""
    value = 1
    while value < limit:
        yield value
        value *= 2
    yield limit


def _quarters(limit: int) -> Iterator[int]:
    """A quarter, a half and three quarters of the way from WINDOW, and from each of its doubles, to the next double."""
    for value in _doubling(limit):
        if value >= WINDOW:
            yield from (count for part in (1, 2, 3) if (count := value + part * value // 4) < limit)


def _outside_in(values: Iterable[int]) -> list[int]:
    """First, last, middle, then the middles of what is left: each prefix covers the range as well as it can."""
    ordered = sorted(set(values))
    chosen = dict.fromkeys([ordered[0], ordered[-1]])
    spans = [(0, len(ordered) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low < 2:
            continue
        middle = (low + high) // 2
        chosen[ordered[middle]] = None
        spans += [(low, middle), (middle, high)]
    return list(chosen)


def _extremes(tokens: int, max_requests: int, max_depth: int) -> list[int]:
    """Fewest and most requests that make up this many tokens: two sizes at equal tokens give the per-request term."""
    fewest = -(-tokens // (max_depth + 1))
    return sorted({fewest, min(tokens, max_requests)})
