"""`sglang-dspark calibrate`: temperatures for a source of confidence from a trace, and how good they make it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sglang_dspark.confidence.calibration import Calibration
    from sglang_dspark.observe import Trace

    Doubles = NDArray[np.float64]


def add_calibrate(commands: Any) -> Callable[[argparse.Namespace], int]:
    """`calibrate`: from a trace to a calibration file."""
    parser = commands.add_parser("calibrate", help="fit a calibration of the confidences to a recorded trace")
    parser.add_argument("--trace", type=Path, required=True, help="file that a server wrote under DSPARK_TRACE")
    parser.add_argument("--out", type=Path, required=True, help="JSON for --speculative-dspark-confidence-sts-path")
    parser.add_argument("--plot", type=Path, help="PNG with a reliability curve for each verify rule")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object instead of a table")

    def run(args: argparse.Namespace) -> int:
        from sglang_dspark.confidence.calibration import save_calibration
        from sglang_dspark.observe import read_trace

        if args.plot is not None:
            check_plot(args.plot)
        trace = read_trace(args.trace)
        logits = raw_logits(trace)
        calibration = calibrate(trace, logits)
        rows = figures(trace, logits, calibration)
        save_calibration(args.out, calibration)
        if args.plot is not None:
            plot(trace, logits, calibration, args.plot)
        if args.json:
            print(json.dumps({"trace": str(args.trace), "records": len(trace.records), "positions": rows}))
        else:
            show(rows)
        return 0

    parser.set_defaults(run=run)
    return run


def raw_logits(trace: Trace) -> Doubles:
    """[n, gamma] what the trace's source says before anything was learnt; NaN past the depth.

    Raises:
        ValueError: the trace's features are of no source, or its records count other verify rules than the sources do.
    """
    from sglang_dspark.confidence import RULES, source_of

    if trace.rules != RULES:
        raise ValueError(
            f"the trace has the verify rules {', '.join(trace.rules) or 'none'} where {', '.join(RULES)} are known; "
            "record it with this version."
        )
    records = trace.records
    return source_of(trace.features).logits(*(records[name].copy() for name in ("shown", "recent", "rule")))


def calibrate(trace: Trace, logits: Doubles) -> Calibration:
    """The calibration of a trace's source.

    Raises:
        ValueError: no verify rule has samples enough, or the trace's features are of no source.
    """
    import numpy as np

    from sglang_dspark.confidence import source_of
    from sglang_dspark.confidence.calibration import LEAST_SAMPLES, Calibration, fit_temperatures

    records = trace.records
    fits = {}
    for index, rule in enumerate(trace.rules):
        mine = (records["rule"] == index) & (records["clean"] > 0)
        if np.count_nonzero(mine & (records["verified"] > 0)) >= LEAST_SAMPLES:
            chosen = records[mine]
            fits[rule] = fit_temperatures(logits[mine], chosen["accepted"].astype(int), chosen["verified"].astype(int))
    if not fits:
        raise ValueError(
            f"the trace has fewer than {LEAST_SAMPLES} verified rows of each verify rule; record a longer one."
        )
    columns = [{rule: tuple(fit[i].tolist()) for rule, fit in fits.items()} for i in range(4)]
    return Calibration(source_of(trace.features).name, *columns)


def figures(trace: Trace, logits: Doubles, calibration: Calibration) -> list[dict[str, Any]]:
    """For each rule and position: temperature, samples, and of survival the calibration error before and after, the
    Brier score after, and the area under the ROC curve of the position's own acceptance."""
    from sglang_dspark.confidence.reliability import auc, brier

    rows = []
    for rule, temperatures in calibration.temperatures.items():
        for k, temperature in enumerate(temperatures):
            survival, survived, confidence, accepted = outcomes(trace, logits, calibration, rule, k)
            rows.append(
                {
                    "rule": rule,
                    "position": k + 1,
                    "temperature": round(temperature, 4),
                    "samples": calibration.samples[rule][k],
                    "ece_before": _rounded(calibration.ece_before[rule][k]),
                    "ece_after": _rounded(calibration.ece_after[rule][k]),
                    "brier": _rounded(brier(survival, survived)),
                    "auc": _rounded(auc(confidence, accepted)),
                }
            )
    return rows


def outcomes(
    trace: Trace, logits: Doubles, calibration: Calibration, rule: str, position: int
) -> tuple[Doubles, NDArray[np.bool_], Doubles, NDArray[np.bool_]]:
    """Calibrated survival of a position (from 0) and whether it survived, of the rows that verified it; its calibrated
    confidence and whether it was accepted, of those that also reached it."""
    import numpy as np

    records = trace.records
    mine = (records["rule"] == trace.rules.index(rule)) & (records["clean"] > 0) & (records["verified"] > position)
    temperatures = np.array(calibration.temperatures[rule][: position + 1])
    confidence = 1 / (1 + np.exp(-logits[mine, : position + 1] / temperatures))
    usable = np.isfinite(confidence).all(axis=1)
    confidence, accepted = confidence[usable], records["accepted"][mine][usable]
    reached = accepted >= position
    return confidence.prod(axis=1), accepted > position, confidence[reached, -1], accepted[reached] > position


def show(rows: list[dict[str, Any]]) -> None:
    """The figures as a table."""
    columns = list(rows[0])
    widths = [max(len(c), *(len(str(row[c])) for row in rows)) for c in columns]
    for line in [dict(zip(columns, columns, strict=True)), *rows]:
        cells = ["-" if line[c] is None else str(line[c]) for c in columns]
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


def check_plot(path: Path) -> None:
    """Refuse a plot, before anything is written, where matplotlib is missing: it is an extra of this package."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--plot {path} needs matplotlib ({error}); pip install sglang-dspark[report], or leave --plot out."
        ) from None


def plot(trace: Trace, logits: Doubles, calibration: Calibration, path: Path) -> None:
    """Reliability of survival for each rule: a curve a position, after calibration; dots have 20 samples or more."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from sglang_dspark.confidence.reliability import reliability

    rules = list(calibration.temperatures)
    figure, axes = plt.subplots(1, len(rules), figsize=(4.5 * len(rules), 4), constrained_layout=True, squeeze=False)
    for axis, rule in zip(axes[0], rules, strict=True):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for k in range(calibration.gamma):
            survival, survived, _, _ = outcomes(trace, logits, calibration, rule, k)
            curve = reliability(survival, survived)
            filled = curve.samples >= 20
            axis.plot(curve.confidence[filled], curve.outcome[filled], "o-", markersize=3, label=f"position {k + 1}")
        axis.set(xlabel="survival said", ylabel="share that survived", xlim=(0, 1), ylim=(0, 1), title=rule)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 4)
