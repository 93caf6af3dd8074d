"""Sequential temperature scaling: a temperature for each verify rule and position that makes survival calibrated.

Position by position, the temperature is chosen from a grid that gives the cumulative product of the confidences the
smallest expected calibration error, the temperatures before it being fixed (arXiv 2607.05147, section 3.3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.confidence.reliability import BINS, brier, calibration_error
from sglang_dspark.files import written_whole

FORMAT = "sglang-dspark-calibration/1"
GRID = np.geomspace(0.2, 5.0, 161)  # steps of 2%, 1 in the middle; a temperature beyond would mean a broken source
LOWEST, HIGHEST = 0.05, 20.0  # what a file may say, wider than the grid: SGLang's tool has another one
LEAST_SAMPLES = 200  # of a position; with fewer the noise of the error chooses, and the position keeps 1
LARGEST_FILE = 1 << 20


@dataclass(frozen=True)
class Calibration:
    """Temperatures of one source of confidence: raw logits are divided by them.

    temperatures, samples, ece_before, ece_after: for each verify rule, [gamma]; the errors are of survival, before and
    after, NaN where a position has no samples.
    """

    source: str
    temperatures: dict[str, tuple[float, ...]]
    samples: dict[str, tuple[int, ...]]
    ece_before: dict[str, tuple[float, ...]]
    ece_after: dict[str, tuple[float, ...]]

    def temperature(self, rules: Sequence[str]) -> NDArray[np.float64]:
        """[rules, gamma] in the order of ``rules``; a rule that the file does not have keeps 1."""
        gamma = self.gamma
        return np.array([self.temperatures.get(rule, (1.0,) * gamma) for rule in rules], np.float64)

    @property
    def gamma(self) -> int:
        return len(next(iter(self.temperatures.values())))


def fit_temperatures(
    logits: NDArray[np.floating], accepted: NDArray[np.integer], verified: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Temperatures of one verify rule, with the samples and the survival's calibration error before and after: [gamma].

    logits: [n, gamma]. accepted, verified: [n] draft tokens, anchor and bonus excluded. Of a position only the rows
    that verified it count, rejected before it or not: the schedule chose them before it knew the outcome, so they are a
    fair sample, while a rejection alone, known of rows that verified less, would not be.
    """
    gamma = logits.shape[1]
    temperatures, samples = np.ones(gamma), np.zeros(gamma, np.int64)
    before, after = np.full(gamma, np.nan), np.full(gamma, np.nan)
    plain, scaled = np.ones(len(logits)), np.ones(len(logits))
    usable = np.ones(len(logits), bool)
    for k in range(gamma):
        usable &= (verified > k) & np.isfinite(logits[:, k])
        rows = np.flatnonzero(usable)
        samples[k] = len(rows)
        plain *= _sigmoid(logits[:, k])
        if len(rows) >= LEAST_SAMPLES:
            survived = accepted[rows] > k
            temperatures[k] = _best(scaled[rows], logits[rows, k], survived)
        scaled *= _sigmoid(logits[:, k] / temperatures[k])
        before[k] = calibration_error(plain[rows], accepted[rows] > k)
        after[k] = calibration_error(scaled[rows], accepted[rows] > k)
    return temperatures, samples, before, after


def _sigmoid(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    with np.errstate(over="ignore", invalid="ignore"):
        return 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)))


def _best(before: NDArray[np.float64], logits: NDArray[np.floating], survived: NDArray[np.bool_]) -> float:
    """The temperature T of GRID that gives survivals before * sigmoid(logits / T), [n], the least calibration error.

    The error is jagged in the temperature, since rows jump from bin to bin; of those that cannot be told from the
    smallest on so few rows, the one with the smallest Brier score is taken.
    """
    errors, scores = np.empty(len(GRID)), np.empty(len(GRID))
    for i, temperature in enumerate(GRID):
        survival = before * _sigmoid(logits / temperature)
        errors[i], scores[i] = calibration_error(survival, survived), brier(survival, survived)
    noise = 0.5 * 0.36 * math.sqrt(BINS / len(survived))  # half of what a perfect predictor would show
    return float(GRID[np.where(errors <= errors.min() + noise, scores, np.inf).argmin()])


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Writes JSON, NaN as null; atomically and readable by the owner only."""
    content = asdict(calibration)
    for name in ("ece_before", "ece_after"):
        content[name] = {rule: [None if v != v else v for v in row] for rule, row in content[name].items()}
    text = json.dumps({"format": FORMAT, **content}, indent=1, allow_nan=False)
    with written_whole(path) as file:
        file.write_text(text + "\n", encoding="utf-8")


def load_calibration(path: Path, rules: Sequence[str], gamma: int | None = None) -> Calibration:
    """Reads a file of :func:`save_calibration`, or SGLang's (``--speculative-dspark-confidence-sts-path``, a list of
    temperatures of a confidence head, for all rules alike).

    gamma: positions the file must have; None takes any number.

    Raises:
        ValueError: what is wrong with the file, in one sentence that names it and says what to do.
    """
    content = _read(path)
    try:
        calibration = (_ours if "format" in content else _sglangs)(content, rules)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"Calibration {path} is damaged or of another version ({type(error).__name__}: {error}); "
            "make it anew with sglang-dspark calibrate."
        ) from None
    if gamma is not None and calibration.gamma != gamma:
        raise ValueError(
            f"Calibration {path} is for {calibration.gamma} draft positions and --speculative-num-steps is {gamma}; "
            "record a trace with that many and fit it anew."
        )
    return calibration


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"Calibration {path} is larger than {LARGEST_FILE} bytes; it is none of ours.")
    if data[:1] == b"\x80" or data[:2] == b"PK":
        raise ValueError(f"Calibration {path} is a pickle, which could run code; only JSON is read.")
    try:
        content = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Calibration {path} cannot be read as JSON ({error}); make it anew with sglang-dspark calibrate."
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"Calibration {path} holds a {type(content).__name__} where a JSON object is needed.")
    return content


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _ours(content: dict[str, Any], rules: Sequence[str]) -> Calibration:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r} is not {FORMAT}")
    if not isinstance(content["source"], str):
        raise TypeError("source is not a name")
    temperatures = {rule: _temperatures(row) for rule, row in content["temperatures"].items()}
    if not temperatures or not set(temperatures) <= set(rules):
        raise ValueError(f"temperatures are for {', '.join(temperatures) or 'no rule'}, not for {', '.join(rules)}")
    gamma = len(next(iter(temperatures.values())))
    if any(len(row) != gamma for row in temperatures.values()):
        raise ValueError("the rules have different numbers of positions")
    report = {
        name: {rule: tuple(math.nan if v is None else kind(v) for v in content[name][rule]) for rule in temperatures}
        for name, kind in (("samples", int), ("ece_before", float), ("ece_after", float))
    }
    if any(len(row) != gamma for rows in report.values() for row in rows.values()):
        raise ValueError("a report has another number of positions than the temperatures")
    return Calibration(content["source"], temperatures, **report)  # type: ignore[arg-type]


def _sglangs(content: dict[str, Any], rules: Sequence[str]) -> Calibration:
    row = _temperatures(content["temperatures"])
    nothing = {rule: (math.nan,) * len(row) for rule in rules}
    samples = {rule: (int(content.get("num_samples", 0)),) * len(row) for rule in rules}
    return Calibration("head", {rule: row for rule in rules}, samples, nothing, nothing)


def _temperatures(row: Any) -> tuple[float, ...]:
    if not isinstance(row, list) or not row:
        raise TypeError("temperatures are not a list of numbers")
    for value in row:
        if isinstance(value, bool) or not isinstance(value, int | float) or not LOWEST <= value <= HIGHEST:
            raise ValueError(f"temperature {value!r} is not a number from {LOWEST:g} to {HIGHEST:g}")
    return tuple(float(value) for value in row)
