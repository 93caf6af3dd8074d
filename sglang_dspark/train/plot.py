"""The loss curve of a fit, and the acceptance it saw on its training text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Moving mean over `width` values, shorter at the start: [n] -> [n]."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (total[ends] - total[starts]) / (ends - starts)


def plot_fit(log: Path, out: Path) -> None:
    """Draw fit.json as a PNG: loss on the left, acceptance by draft position on the right.

    Left out, with a line on stderr, where matplotlib is missing: a draft is none the worse without its picture.
    """
    try:
        import matplotlib
    except ImportError as error:
        print(f"{out} is left out ({error}); pip install sglang-dspark[report] brings matplotlib.", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = json.loads(log.read_text())["steps"]
    loss = np.array([entry["loss"] for entry in steps])
    acceptance = np.array([entry["acceptance"] for entry in steps])
    width = max(1, len(steps) // 50)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), constrained_layout=True)
    left.plot(smooth(loss, width))
    left.set(xlabel="step", ylabel="loss per chain (nats)", yscale="log")
    for position in range(acceptance.shape[1]):
        right.plot(smooth(acceptance[:, position], width), label=f"position {position + 1}")
    right.set(xlabel="step", ylabel="acceptance, training text", ylim=(0, 1))
    right.legend(frameon=False)
    figure.savefig(out, dpi=100)
    plt.close(figure)
