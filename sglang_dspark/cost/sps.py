"""Reads SGLang's own step-cost files (--speculative-dspark-sps-table-path) into a cost table."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dspark.cost.isotonic import isotonic_median
from sglang_dspark.cost.robust import fit_terms
from sglang_dspark.cost.table import CostTable


def load_sps_table(path: str | Path, *, tiers: tuple[int, ...] | None = None) -> CostTable:
    """Both of SGLang 0.5.23's formats (srt/speculative/dspark_components/dspark_sps.py), told apart by bias_seconds.

    SpsCostTable: steps per second at token counts. SpsAdditiveCostTable: bias + alpha(requests) + theta(tokens); alpha,
    a curve there, becomes the line nearest to it. Neither prices drafting or context: with these the draft is free.
    Times are made non-decreasing and priced by the tier above or between the probes, not by the probe below as SGLang
    does. Raises ValueError, one sentence, where the file is neither.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if "bias_seconds" in content:
            return _additive(content, tiers)
        rates = np.asarray(content["sample_steps_per_sec"], np.float64)
        if not (rates > 0).all():
            raise ValueError(f"a rate of {rates.min()} steps per second has no time")
        return _table(content["sample_batch_tokens"], 1.0 / rates, 0.0, tiers)
    except (OSError, KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        flag = f"--speculative-dspark-sps-table-path {path}"
        raise ValueError(f"{flag} is not a usable step-cost file: {error!r}.") from error


def _additive(content: dict[str, Any], tiers: tuple[int, ...] | None) -> CostTable:
    requests = np.asarray(content["bs_probes"], np.float64)
    alpha = np.asarray(content["alpha_seconds"], np.float64)
    base, slope = fit_terms(np.stack([np.ones_like(requests), requests], axis=1), np.maximum(alpha, 0.0))
    theta = np.asarray(content["theta_seconds"], np.float64)
    return _table(content["m_probes"], content["bias_seconds"] + base + theta, float(slope), tiers)


def _table(tokens: Any, seconds: np.ndarray, per_request: float, tiers: tuple[int, ...] | None) -> CostTable:
    if len(tokens) != len(seconds) or not len(tokens):
        raise ValueError(f"{len(tokens)} token counts for {len(seconds)} times")
    return CostTable(
        tokens=tuple(int(t) for t in tokens),
        seconds=tuple(float(s) for s in isotonic_median(seconds)),
        per_request=per_request,
        tiers=tiers,
    )
