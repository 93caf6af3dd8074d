"""The whole recipe: split the prompts, generate, fit, export, measure on what was left out."""

from __future__ import annotations

import json
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.train.data import Prompt, digest, is_left_out, read_prompts
from sglang_dspark.train.evaluate import evaluate
from sglang_dspark.train.export import export, import_draft
from sglang_dspark.train.fit import Fitting, fit, load_draft
from sglang_dspark.train.generate import Generation, generate
from sglang_dspark.train.plot import plot_fit
from sglang_dspark.train.store import load_samples
from sglang_dspark.train.target import Target

# Measured on every left-out prompt, greedy, and on some at temperature 1, which serving defaults to.
LEFT_OUT_ANSWERS = ((0.0, 1.0), (1.0, 0.3))
# Longer prompts than trained on count, too: a server gets them. Covers all but the longest 1 % of the prompts used.
LEFT_OUT_PROMPT_TOKENS = 1200


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on. `left_out` is the fraction of prompts kept for measuring."""

    target: Path
    prompts: Path
    out: Path
    work: Path
    workers: int
    left_out: float
    generation: Generation
    fitting: Fitting


def split(prompts: list[Prompt], fraction: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, left-out prompts); see data.is_left_out for the rule."""
    kept = [p for p in prompts if not is_left_out(p.text, fraction, seed)]
    left = [p for p in prompts if is_left_out(p.text, fraction, seed)]
    return kept, left


def train(recipe: Recipe) -> dict[str, Any]:
    """Run the recipe; the draft, metrics.json and fit.png land in `recipe.out`. Returns the metrics.

    Wrong input raises ValueError with the remedy before anything is generated.
    """
    prompts = read_prompts(recipe.prompts)
    kept, left = split(prompts, recipe.left_out, recipe.generation.seed)
    if not kept or not left:
        raise ValueError(
            f"--left-out {recipe.left_out} leaves {len(kept)} prompts to train on and {len(left)} to measure on; "
            "give more prompts or another fraction"
        )
    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = work()
        seconds[stage] = round(time.monotonic() - began, 1)
        return result

    longest = max(recipe.generation.max_prompt_tokens, LEFT_OUT_PROMPT_TOKENS)
    measuring = replace(recipe.generation, answers=LEFT_OUT_ANSWERS, max_prompt_tokens=longest, batches=None)
    data = timed("generate", lambda: generate(recipe.target, kept, recipe.work, recipe.generation, recipe.workers))
    fitted = timed("fit", lambda: fit(recipe.target, data, recipe.work, recipe.fitting, recipe.workers))
    left_data = timed(
        "generate_left_out",
        lambda: generate(recipe.target, left, recipe.work, measuring, recipe.workers, label="left-out"),
    )
    target = Target(recipe.target)
    size = export(load_draft(fitted, target), recipe.out)
    shipped = import_draft(recipe.out, target.shape, target.embed)
    report = timed("evaluate", lambda: evaluate(shipped, load_samples(left_data)))
    metrics = {
        "accepted_length": report,
        "prompts": {
            "sha256": digest(prompts),
            "files": dict(Counter(p.source for p in prompts)),
            "left_out": dict(Counter(p.source for p in left)),
            "left_out_rule": "first 8 bytes of SHA-256('left-out-SEED:' + prompt text), big-endian, / 2**64 < FRACTION",
            "left_out_fraction": recipe.left_out,
        },
        "data": describe(data),
        "generation": asdict(recipe.generation),
        "fitting": asdict(recipe.fitting),
        "workers": recipe.workers,
        "draft_bytes": size,
        # Of this run; a stage found done from an earlier one takes about 0. The fit's own is kept with its log.
        "seconds": seconds,
        "fit_seconds": json.loads((fitted / "fit.json").read_text())["seconds"],
        "peak_memory_mb_of_a_process": max(
            resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    (recipe.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    plot_fit(fitted / "fit.json", recipe.out / "fit.png")
    return metrics


def describe(data: Path) -> dict[str, int]:
    """Sizes of generated training data."""
    samples = load_samples(data)
    answer_tokens = sum(s.tokens.numel() - s.prompt_tokens for s in samples)
    return {
        "answers": len(samples),
        "answer_tokens": answer_tokens,
        "context_tokens": sum(s.prompt_tokens for s in samples),
        "bytes": sum(file.stat().st_size for file in data.iterdir()),
    }
