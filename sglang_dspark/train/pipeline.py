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

from sglang_dspark.train.check import check_draft, check_flags, check_prompts, check_target
from sglang_dspark.train.data import Prompt, digest, is_left_out, read_prompts
from sglang_dspark.train.evaluate import evaluate
from sglang_dspark.train.examples import gather
from sglang_dspark.train.export import export
from sglang_dspark.train.fit import Fitting, fit, load_draft
from sglang_dspark.train.generate import Generation, generate
from sglang_dspark.train.head import fit_head, judge
from sglang_dspark.train.load import import_draft
from sglang_dspark.train.plot import plot_fit
from sglang_dspark.train.store import load_samples
from sglang_dspark.train.target import Target
from sglang_dspark.train.variations import Variations, write_variations

# Measured on a share of the left-out prompts, drawn by hash; all of them take longer to answer than a head to train.
LEFT_OUT_ANSWERS = ((0.0, 0.4), (1.0, 0.25))
# Longer prompts than trained on count, too: a server gets them. Covers all but the longest 1 % of the prompts used.
LEFT_OUT_PROMPT_TOKENS = 1200


# Left-out answers at which a head is judged this many draft positions deep; enough chains come that far.
DEPTH = 5


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on. `left_out` is the fraction of prompts kept for measuring.

    `start` is a draft's folder, in SGLang's format, to go on from, which was fitted to the first `known` batches of
    answers; of the draft in `frozen` only the head is trained. `held` last batches are kept from the draft for its head
    (None: see hold_back).
    """

    target: Path
    prompts: Path
    out: Path
    work: Path
    workers: int
    left_out: float
    generation: Generation
    variations: Variations
    fitting: Fitting
    start: Path | None = None
    known: int = 0
    frozen: Path | None = None
    held: int | None = None


def split(prompts: list[Prompt], fraction: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, left-out prompts); see data.is_left_out for the rule."""
    kept = [p for p in prompts if not is_left_out(p.text, fraction, seed)]
    left = [p for p in prompts if is_left_out(p.text, fraction, seed)]
    return kept, left


def hold_back(answers: list[Path], variations: list[Path], count: int | None = None) -> tuple[list[Path], list[Path]]:
    """(shards for the draft, shards for its head): a draft is too sure of text it was fitted to, and a head that learnt
    there would be, too.

    Held back are the last `count` of the variations, or of the answers where there are none; a fifth, if not given; of
    one shard, none.
    """
    source = variations or answers
    held = source[-(count or max(1, len(source) // 5)) :]
    rest = [shard for shard in answers + variations if shard not in held]
    return rest or source, held


class Stages:
    """Seconds of each stage; a stage found done from an earlier run takes about 0."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = work()
        self.seconds[stage] = round(time.monotonic() - began, 1)
        return result


def train(recipe: Recipe) -> dict[str, Any]:
    """Run the recipe; the draft with its head, metrics.json and fit.png land in `recipe.out`. Returns the metrics.

    Of a frozen draft only head and metrics do. Wrong input raises ValueError with the remedy before anything is
    generated. The plot comes last, and is left out where matplotlib is missing.
    """
    check_flags(recipe)
    prompts = read_prompts(recipe.prompts)
    kept, left = split(prompts, recipe.left_out, recipe.generation.seed)
    if not kept or not left:
        raise ValueError(
            f"--left-out {recipe.left_out} leaves {len(kept)} prompts to train on and {len(left)} to measure on; "
            "give more prompts or another fraction"
        )
    shape = check_target(recipe.target)
    check_draft(recipe, shape)
    longest = max(recipe.generation.max_prompt_tokens, LEFT_OUT_PROMPT_TOKENS)
    longest = min(longest, shape.max_positions - recipe.generation.max_new_tokens)
    measuring = replace(recipe.generation, answers=LEFT_OUT_ANSWERS, max_prompt_tokens=longest, batches=None)
    check_prompts(recipe, kept, left, measuring, shape)
    timed = Stages()
    where = (recipe.target, kept, recipe.work)
    answers = timed("generate", lambda: generate(*where, recipe.generation, recipe.workers))
    varied = timed("write_variations", lambda: write_variations(*where, recipe.variations, recipe.workers))
    for_draft, for_head = hold_back(answers, varied, recipe.held)
    target = Target(recipe.target)
    metrics: dict[str, Any] = {}
    if recipe.frozen is None:
        fit_on = (recipe.target, for_draft, recipe.work, recipe.fitting, recipe.workers, recipe.start, recipe.known)
        fitted = timed("fit", lambda: fit(*fit_on))
        metrics["draft_bytes"] = export(load_draft(fitted, target), recipe.out)
        # The fit's own time is kept with its log: the stage's is 0 where it was found done.
        metrics["fit_seconds"] = json.loads((fitted / "fit.json").read_text())["seconds"]
    shipped = import_draft(recipe.frozen or recipe.out, target.shape, target.embed)
    shown = timed("head_examples", lambda: gather(shipped, target, load_samples(for_head), DEPTH))
    head, metrics["head"] = timed("fit_head", lambda: fit_head(shown, target.embed, recipe.out))
    left_data = timed(
        "generate_left_out",
        lambda: generate(recipe.target, left, recipe.work, measuring, recipe.workers, label="left-out"),
    )
    left_samples = load_samples(left_data)
    metrics["accepted_length"] = timed("evaluate", lambda: evaluate(shipped, left_samples))
    metrics["confidence"] = timed("judge", lambda: judge(head, gather(shipped, target, left_samples, DEPTH)))
    metrics |= {
        "prompts": {
            "sha256": digest(prompts),
            "files": dict(Counter(p.source for p in prompts)),
            "left_out": dict(Counter(p.source for p in left)),
            "left_out_rule": "first 8 bytes of SHA-256('left-out-SEED:' + prompt text), big-endian, / 2**64 < FRACTION",
            "left_out_fraction": recipe.left_out,
        },
        "data": {"draft": describe(for_draft), "head": describe(for_head)},
        "generation": asdict(recipe.generation),
        "variations": asdict(recipe.variations),
        "fitting": asdict(recipe.fitting),
        "workers": recipe.workers,
        "seconds": timed.seconds,
        "peak_memory_mb_of_a_process": max(
            resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    (recipe.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    if recipe.frozen is None:
        plot_fit(fitted / "fit.json", recipe.out / "fit.png")
    return metrics


def describe(shards: list[Path]) -> dict[str, int]:
    """Sizes of generated training data."""
    samples = load_samples(shards)
    answer_tokens = sum(s.tokens.numel() - s.prompt_tokens for s in samples)
    return {
        "answers": len(samples),
        "answer_tokens": answer_tokens,
        "context_tokens": sum(s.prompt_tokens for s in samples),
        "bytes": sum(shard.stat().st_size for shard in shards),
    }
