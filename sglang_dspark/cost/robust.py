"""Non-negative least absolute deviations for a few coefficients: the regression behind the fitted cost terms."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Reweighting converges well before this on grids of up to a few hundred points; more only costs start-up time.
_ROUNDS = 25


def _solve(columns: Floats, y: Floats) -> Floats | None:
    """Least absolute relative deviations by reweighted least squares; None where the columns do not determine it."""
    scale = 1.0 / np.maximum(np.abs(y), 1e-12)
    a, b = columns * scale[:, None], y * scale
    norms = np.linalg.norm(a, axis=0)
    if not norms.all() or np.linalg.matrix_rank(a / norms) < a.shape[1]:
        return None
    a = a / norms
    weight = np.ones(len(y))
    for _ in range(_ROUNDS):
        solution = np.linalg.lstsq(a * weight[:, None], b * weight, rcond=None)[0]
        weight = 1.0 / np.sqrt(np.maximum(np.abs(a @ solution - b), 1e-6))
    return solution / norms


def fit_terms(terms: Floats, y: Floats, levels: Floats | None = None) -> Floats:
    """Coefficients >= 0, [t], of terms [n, t] that explain y [n] best in absolute relative error.

    levels [n, m]: columns with free coefficients, fitted beside the terms and not returned (one-hot token counts, which
    make the terms explain only what differs at equal tokens). Of terms the data cannot tell apart the first is used.
    """
    count = terms.shape[1]
    free = np.zeros((len(y), 0)) if levels is None else levels
    best, least = np.zeros(count), np.inf
    for size in range(count, -1, -1):
        for chosen in combinations(range(count), size):
            columns = np.concatenate([terms[:, list(chosen)], free], axis=1)
            if not columns.shape[1]:
                continue
            solution = _solve(columns, y)
            if solution is None or (solution[:size] < 0).any():
                continue
            loss = float((np.abs(columns @ solution - y) / np.maximum(np.abs(y), 1e-12)).sum())
            # One part in a thousand: reweighting does not converge further, and fewer terms must not win by that noise.
            if loss < least * 0.999:
                least, best = loss, np.zeros(count)
                best[list(chosen)] = solution[:size]
    return best
