"""What a run can be refused for before anything is generated: after hours is too late to learn of a wrong flag."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from sglang_dspark.train.data import Prompt
from sglang_dspark.train.generate import Generation, shared_prefix, shared_suffix, tokenise
from sglang_dspark.train.load import import_draft
from sglang_dspark.train.target import LAYER_WEIGHTS, Shape

if TYPE_CHECKING:
    from sglang_dspark.train.pipeline import Recipe


@contextmanager
def _of(flag: str) -> Iterator[None]:
    """Say which flag a ValueError is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error


def check_flags(recipe: Recipe) -> None:
    """ValueError for a number out of its range, or flags that exclude one another."""
    fitting, generation = recipe.fitting, recipe.generation
    least = {
        "--workers": (recipe.workers, 1),
        "--max-prompt-tokens": (generation.max_prompt_tokens, 1),
        "--max-new-tokens": (generation.max_new_tokens, 2),  # of one token, no draft can be scored
        "--batches": (generation.batches, 1),
        "--variations": (recipe.variations.batches, 0),
        "--known-batches": (recipe.known, 0),
        "--head-batches": (recipe.held, 1),
        "--draft-vocab": (fitting.draft_vocab, 1),
        "--epochs": (fitting.epochs, 1),
        "--answers-per-step": (fitting.answers_per_step, 1),
        "--rollout-steps": (fitting.steps, 1),
    }
    for flag, (value, bound) in least.items():
        if value is not None and value < bound:
            raise ValueError(f"{flag} {value} must be {bound} or more.")
    shares = [("--sampled-share", share) for _, share in generation.answers]
    shares += [("--known-share", fitting.known_share), ("--prompt-share", fitting.prompt_share)]
    for flag, share in shares:
        if not 0 <= share <= 1:
            raise ValueError(f"{flag} {share} must be from 0 to 1.")
    if recipe.frozen is not None and recipe.start is not None:
        raise ValueError(
            f"--head-only {recipe.frozen} trains no draft, which --start-from {recipe.start} would; leave one out."
        )


def check_target(folder: Path) -> Shape:
    """The shape of a target that Target can read, by its config.json and the names in its files.

    Raises:
        ValueError: it is not a plain Llama of layers enough, or a weight is missing.
        OSError: of the system, where there is no config.json.
    """
    with _of("--target"):
        shape = Shape.read(folder)
        try:
            shape.captured()
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        missing = sorted(_weights(shape) - _names(folder))
        if missing:
            raise ValueError(
                f"{folder}: its *.safetensors lack {len(missing)} weights of a Llama, {missing[0]} for one; fetch or "
                "convert the model again"
            )
    return shape


def _weights(shape: Shape) -> set[str]:
    """What Target reads; a head is not needed, where the embedding is it."""
    layers = {f"model.layers.{i}.{name}.weight" for i in range(shape.layers) for name in LAYER_WEIGHTS}
    return {"model.embed_tokens.weight", "model.norm.weight"} | layers


def _names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                names |= set(opened.keys())
        except SafetensorError as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error}); fetch the model again") from error
    return names


def check_draft(recipe: Recipe, shape: Shape) -> None:
    """ValueError where the draft to begin with cannot be read, or the new one would say more than its target can."""
    for flag, folder in (("--head-only", recipe.frozen), ("--start-from", recipe.start)):
        if folder is not None:
            with _of(flag):
                import_draft(folder, shape, torch.empty(0))
            return
    if recipe.fitting.draft_vocab > shape.vocab:
        raise ValueError(
            f"--draft-vocab {recipe.fitting.draft_vocab} is more than the target's {shape.vocab} tokens; lower it."
        )


def check_prompts(recipe: Recipe, kept: list[Prompt], left: list[Prompt], measuring: Generation, shape: Shape) -> None:
    """ValueError where the prompts to train on or to measure on yield no text that the draft or its head needs.

    measuring: how the left-out prompts are answered. Reads the target's tokenizer.
    """
    generation, room = recipe.generation, shape.max_positions
    trained = tokenise(kept, recipe.target, generation)
    if not trained:
        raise ValueError(
            f"--max-prompt-tokens {generation.max_prompt_tokens} leaves none of {len(kept)} prompts to train on; raise "
            "it, or give shorter prompts."
        )
    longest = max(len(row.tokens) for row in trained) + generation.max_new_tokens
    if recipe.variations.batches:
        longest = max(longest, recipe.variations.longest + shared_prefix(trained) + shared_suffix(trained))
    if longest > room:
        raise ValueError(
            f"--max-prompt-tokens {generation.max_prompt_tokens} and --max-new-tokens {generation.max_new_tokens} "
            f"make texts of {longest} tokens, and the target takes {room}; lower one."
        )
    if not recipe.variations.batches and not any(t > 0 for row in trained for t in row.temperatures):
        raise ValueError(
            f"--sampled-share {generation.answers[-1][1]} samples no answer, and the confidence head learns from "
            "sampled ones, too; raise it, or give more prompts or --variations."
        )
    if not tokenise(left, recipe.target, measuring):
        raise ValueError(
            f"--left-out {recipe.left_out} leaves {len(left)} prompts to measure on, and none is short and drawn to be "
            "answered; give more prompts or another fraction."
        )
