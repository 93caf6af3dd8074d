"""More training text, all of it the target's: it writes on from a prompt's opening words, then answers itself.

A draft overfits the texts of a small set of prompts long before it has learnt the target. A few opening words keep a
prompt's domain and manner, and nearly every continuation is a prompt that the set does not hold.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from sglang_dspark.train.data import Prompt
from sglang_dspark.train.generate import (
    CACHE_TOKENS,
    COMPACT_BELOW,
    Generation,
    Row,
    choose,
    make_shards,
    shard_folder,
    shared_prefix,
    shared_suffix,
    tokenise,
)
from sglang_dspark.train.store import Sample
from sglang_dspark.train.target import Cache, Target


@dataclass(frozen=True)
class Variations:
    """What decides the written text, together with the target and the prompts."""

    batches: int = 0
    seed: int = 0
    opening: tuple[int, int] = (4, 24)  # tokens of a prompt kept, least and most
    max_turn_tokens: int = 64  # of the user turn, beyond the opening
    # At 1 a small target often wanders into noise that no user writes.
    turn_temperature: float = 0.8
    max_new_tokens: int = 128
    sampled_share: float = 0.35  # of the dialogues answered at temperature 1, the rest greedily

    @property
    def longest(self) -> int:
        """Tokens of a dialogue at most, without what the chat template adds."""
        return self.opening[1] + self.max_turn_tokens + self.max_new_tokens


class Dialogue:
    """One row being decoded: its opening, what the target writes on, the template's close, and the answer."""

    def __init__(
        self, opening: list[int], close: list[int], temperature: float, domain: str, eos: tuple[int, ...]
    ) -> None:
        """eos: the tokens of which any ends the answer."""
        self.opening = len(opening)
        self.close = close
        self.temperature = temperature
        self.domain = domain
        self.eos = eos
        self.text: list[int] = []
        self.answer_at: int | None = None
        self._pending = list(opening)

    def say(self, sampled: int, options: Variations) -> int:
        """The next token: what the script holds, or else the target's `sampled`; after the end nothing new."""
        if self.ended(options):
            return self.text[-1]
        turn_is_full = self.answer_at is None and len(self.text) >= self.opening + options.max_turn_tokens
        if not self._pending and self.answer_at is None and (turn_is_full or sampled == self.close[0]):
            self._pending = list(self.close)
            self.answer_at = len(self.text) + len(self.close)
        self.text.append(self._pending.pop(0) if self._pending else sampled)
        return self.text[-1]

    def opening_words(self) -> list[int]:
        """The prompt's tokens that it begins with."""
        return (self.text + self._pending)[: self.opening]

    def next_temperature(self, options: Variations) -> float:
        answering = self.answer_at is not None and len(self.text) >= self.answer_at
        return self.temperature if answering else options.turn_temperature

    def ended(self, options: Variations) -> bool:
        """Whether the answer is complete: at EOS or its limit."""
        if self.answer_at is None or len(self.text) <= self.answer_at:
            return False
        return self.text[-1] in self.eos or len(self.text) == self.answer_at + options.max_new_tokens


@torch.inference_mode()
def write_on(
    target: Target, prefix: list[int], dialogues: list[Dialogue], options: Variations, seed: int
) -> list[Sample]:
    """Decode every dialogue to its end, in lockstep; `prefix` is the template's part before the user's words."""
    generator = torch.Generator().manual_seed(seed)
    most = options.longest + len(dialogues[0].close)
    rows = len(dialogues)
    cache = Cache(target.shape, 1, len(prefix) + most)
    prefix_aux, _ = target.prefill(torch.tensor([prefix]), cache)
    cache.take(torch.zeros(rows, dtype=torch.long))
    aux_out = torch.empty(rows, most, prefix_aux.shape[-1], dtype=torch.float16)
    final_out = torch.empty(rows, most, target.shape.hidden, dtype=torch.float16)
    alive = list(range(rows))
    sampled = [0] * rows  # unused: every dialogue opens with words of its prompt
    for step in range(most):
        tokens = torch.tensor([dialogues[i].say(token, options) for i, token in zip(alive, sampled, strict=True)])
        running = torch.tensor([not dialogues[i].ended(options) for i in alive])
        if not running.any():
            break
        if running.float().mean() < COMPACT_BELOW:
            cache.take(running.nonzero()[:, 0])
            tokens = tokens[running]
            alive = [i for i, runs in zip(alive, running.tolist(), strict=True) if runs]
        aux, final = target.decode(tokens, torch.full((len(alive),), len(prefix) + step), cache)
        aux_out[alive, step] = aux.half()
        final_out[alive, step] = final.half()
        temperatures = torch.tensor([dialogues[i].next_temperature(options) for i in alive])
        sampled = choose(target.logits(final), temperatures, generator).tolist()
    samples = []
    for i, dialogue in enumerate(dialogues):
        size, answer_at = len(dialogue.text), dialogue.answer_at
        assert answer_at is not None  # `most` steps close every turn
        samples.append(
            Sample(
                tokens=torch.tensor(prefix + dialogue.text, dtype=torch.int32),
                aux=torch.cat([prefix_aux[0].half(), aux_out[i, : size - 1]]),
                final=final_out[i, 1 : size - 1].clone(),
                prompt_tokens=len(prefix) + answer_at,
                first=len(prefix),
                domain=dialogue.domain,
                temperature=dialogue.temperature,
            )
        )
    return samples


def plan_dialogues(
    rows: list[Row], prefix: int, suffix: int, options: Variations, batch: int, eos: tuple[int, ...]
) -> list[Dialogue]:
    """The seeded dialogues of a batch, as many as the cache holds; every domain equally often.

    rows: prompts under the chat template, of which `prefix` leading and `suffix` final tokens are the template's own.
    """
    draw = random.Random(f"{options.seed}-{batch}")
    by_domain: dict[str, list[Row]] = {}
    for row in rows:
        by_domain.setdefault(row.domain, []).append(row)
    domains = sorted(by_domain)
    dialogues = []
    for i in range(CACHE_TOKENS // (prefix + options.longest + suffix)):
        row = draw.choice(by_domain[domains[i % len(domains)]])
        words = row.tokens[prefix : len(row.tokens) - suffix]
        opening = words[: draw.randint(*options.opening)]
        temperature = 1.0 if draw.random() < options.sampled_share else 0.0
        dialogues.append(Dialogue(list(opening), list(row.tokens[-suffix:]), temperature, row.domain, eos))
    return dialogues


def _make(target: Target, rows: list[Row], prefix: int, suffix: int, options: Variations, batch: int) -> list[Sample]:
    dialogues = plan_dialogues(rows, prefix, suffix, options, batch, target.shape.eos)
    return write_on(target, list(rows[0].tokens[:prefix]), dialogues, options, seed=options.seed * 100_003 + batch)


def write_variations(
    target: Path, prompts: list[Prompt], work: Path, options: Variations, workers: int, label: str = "variations"
) -> list[Path]:
    """Make (or finish, or find) `options.batches` shards under `work`; returns them in order."""
    if not options.batches:
        return []
    folder = shard_folder(target, prompts, work, replace(options, batches=0), None, label)
    # Only a prompt's first words are used, so no prompt is too long.
    rows = tokenise(prompts, target, Generation(max_prompt_tokens=2**30, answers=((0.0, 1.0),)))
    prefix, suffix = shared_prefix(rows), shared_suffix(rows)
    jobs = {
        folder / f"{batch:05d}.safetensors": partial(
            _make, rows=rows, prefix=prefix, suffix=suffix, options=options, batch=batch
        )
        for batch in range(options.batches)
    }
    make_shards(target, jobs, workers, None, label)
    return list(jobs)
