"""Turns timed forwards into a cost table: medians of repeats, robust terms, a non-decreasing curve in tokens."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.cost.isotonic import isotonic_median, lower_median
from sglang_dspark.cost.padding import WINDOW, Padding, find_padding
from sglang_dspark.cost.robust import fit_terms
from sglang_dspark.cost.table import CostTable

Kind = Literal["verify", "draft", "extend"]


class Sample(NamedTuple):
    """One timed forward."""

    kind: Kind
    requests: int
    tokens: int  # of the forward; for a draft: requests * draft forwards, 0 for the loop that ran none
    kv_tokens: int  # context of all requests together
    seconds: float


def fit_table(
    samples: Iterable[Sample], *, tiers: tuple[int, ...] | None = None, free_depth: int = 1, padding: bool = False
) -> CostTable:
    """Fits every term of CostTable. Needs one verify sample at least; draft and extend terms without samples are 0.

    Repeats of a point count as their median. With tiers a forward counts as the tier it was padded to. The target's
    per-request and context terms are read off points of equal token count where there are such, so a curved token cost
    does not leak into them; the curve is then the isotonic median of what remains. padding: where the samples show that
    some counts gain by it, tiers are found in them; a tier then costs what its own samples say.
    Raises ValueError without a usable verify sample.
    """
    points = _medians(samples, tiers or ())
    if not len(points["verify"]):
        raise ValueError("A cost table needs at least one verify sample with a time above 0; profile the target first.")
    found = _padding_seen(points["verify"]) if padding else None
    if found is not None:
        tiers = found.tiers
        points["verify"] = points["verify"][np.isin(points["verify"][:, 1], tiers)]
    tokens, seconds, per_request, per_kv = _fit_verify(points["verify"])
    draft = np.zeros(3)
    if len(points["draft"]):
        requests, fed, _, y = points["draft"].T
        forwards = fed / requests
        draft = fit_terms(np.stack([forwards, fed, np.ones_like(fed)], axis=1), y)
    extend = np.zeros(3)
    if len(points["extend"]):
        requests, fed, _, y = points["extend"].T
        extend = fit_terms(np.stack([np.ones_like(fed), requests, fed], axis=1), y)
    return CostTable(
        tokens=tuple(int(t) for t in tokens),
        seconds=tuple(float(s) for s in seconds),
        per_request=per_request,
        per_kv_token=per_kv,
        draft_fixed=float(draft[0]),
        draft_per_request=float(draft[1]),
        draft_start=float(draft[2]),
        extend_fixed=float(extend[0]),
        extend_per_request=float(extend[1]),
        extend_per_token=float(extend[2]),
        free_depth=free_depth,
        tiers=tiers,
        padded=None if found is None else found.padded,
    )


def _medians(samples: Iterable[Sample], tiers: tuple[int, ...]) -> dict[Kind, NDArray[np.float64]]:
    """Rows (requests, tokens, kv_tokens, median seconds) for each kind; unusable times are left out."""
    repeats: dict[Kind, dict[tuple[int, int, int], list[float]]] = {
        "verify": defaultdict(list),
        "draft": defaultdict(list),
        "extend": defaultdict(list),
    }
    for sample in samples:
        if np.isfinite(sample.seconds) and sample.seconds > 0 and sample.requests > 0:
            tokens = sample.tokens
            if sample.kind == "verify":
                tokens = next((tier for tier in tiers if tier >= tokens), tokens)
            repeats[sample.kind][sample.requests, tokens, sample.kv_tokens].append(sample.seconds)
    return {
        kind: np.array([(*point, lower_median(np.array(times))) for point, times in sorted(found.items())], np.float64)
        for kind, found in repeats.items()
    }


def _padding_seen(points: NDArray[np.float64]) -> Padding | None:
    """From the verify points of 1, 2, 3, ... tokens, of several the one with the shortest context."""
    times: dict[int, float] = {}
    for _, tokens, _, seconds in sorted(points.tolist(), key=lambda point: -point[2]):
        times[int(tokens)] = seconds
    row = list(takewhile(lambda seconds: seconds > 0, (times.get(count, 0.0) for count in range(1, WINDOW + 1))))
    return find_padding(row, max(times))


def _fit_verify(
    points: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], float, float]:
    """Token counts, curve, seconds per request, seconds per context token."""
    requests, tokens, kv, y = points.T
    counts, group = np.unique(tokens, return_inverse=True)
    terms = np.stack([requests, kv], axis=1)
    # A profile cut short may hold no two sizes at equal tokens; a straight token cost then tells requests from tokens.
    paired = any(np.ptp(requests[group == i]) for i in range(len(counts)))
    levels = np.eye(len(counts))[group] if paired else np.stack([np.ones_like(tokens), tokens], axis=1)
    per_request, per_kv = fit_terms(terms, y, levels)
    rest = y - terms @ [per_request, per_kv]
    curve = np.array([lower_median(rest[group == i]) for i in range(len(counts))])
    # A point dearer at low counts by noise could leave nothing for the curve; a hundredth of its time is then kept.
    return counts, np.maximum(isotonic_median(curve), 0.01 * y.min()), float(per_request), float(per_kv)
