"""The calibration file of --speculative-dspark-confidence-sts-path: SGLang's flag, for our files and SGLang's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.confidence import RULES, Source, load_calibration
from sglang_dspark.config import Refusal

FLAG = "--speculative-dspark-confidence-sts-path"


def temperatures(path: str | None, source: Source, gamma: int) -> NDArray[np.float64] | None:
    """[rules, gamma] temperatures for the estimator's start; None where no file was given.

    Raises:
        Refusal: the file cannot be used with this source of confidence and this many draft positions.
    """
    if not path:
        return None
    try:
        calibration = load_calibration(Path(path), RULES, gamma)
    except (OSError, ValueError) as error:
        raise Refusal(f"{FLAG}: {error}") from None
    if calibration.source != source.name:
        raise Refusal(
            f"{FLAG}: {path} is for confidences of the {calibration.source}, not of the {source.name} as here; "
            "leave it out, or fit one to a trace of this server."
        )
    return calibration.temperature(RULES)
