"""What a draft would be accepted on left-out text: verify steps simulated on answers the target really gave.

On a greedy answer this is exact: an EAGLE chain is accepted as far as it equals the text. On a sampled answer it is
exact in distribution: a chain of argmax drafts is accepted at each position with the probability that the target
samples it.
Accepted length counts the bonus, as SGLang's `spec_accept_length` does: E[N] = 1 + sum_k P(K >= k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sglang_dspark.train.batches import Batch, collate, is_usable
from sglang_dspark.train.model import Draft
from sglang_dspark.train.store import Sample


@dataclass
class Tally:
    """Verify steps of chains at most `depth` long: how many, and how many accepted at least k + 1 drafts."""

    steps: int
    accepted: list[int]

    @classmethod
    def empty(cls, depth: int) -> Tally:
        return cls(0, [0] * depth)

    def add(self, runs: list[int]) -> None:
        self.steps += len(runs)
        for k in range(len(self.accepted)):
            self.accepted[k] += sum(run > k for run in runs)

    def report(self) -> dict[str, Any]:
        """Mean accepted length, and the acceptance of each position given that it was reached (None: never reached)."""
        reached = [self.steps, *self.accepted[:-1]]
        return {
            "verify_steps": self.steps,
            "accepted_length": round(1 + sum(self.accepted) / max(1, self.steps), 4),
            "acceptance": [round(a / r, 4) if r else None for a, r in zip(self.accepted, reached, strict=True)],
        }


@torch.inference_mode()
def agreeing_run(draft: Draft, batch: Batch, depth: int) -> Tensor:
    """How many drafts of a chain started at each column equal the text, int64 [rows, columns].

    0 to depth; less near the text's end.
    """
    to_draft = torch.full((draft.shape.vocab,), -1)
    to_draft[draft.draft_tokens] = torch.arange(draft.draft_tokens.numel())
    runs = torch.zeros_like(batch.text)
    ends = batch.text.shape[1]
    chains = draft.begin(batch.pairs, batch.row, batch.start)
    for step in range(depth):
        hit = chains.logits.argmax(-1) == to_draft[batch.text[chains.row, chains.start + step]]
        runs[chains.row[hit], chains.start[hit]] = step + 1
        following = chains.start + step + 1
        ahead = (following < ends) & (batch.text[chains.row, following.clamp(max=ends - 1)] >= 0)
        keep = hit & ahead
        if step + 1 == depth or not keep.any():
            break
        chains = draft.advance(chains, keep)
    return runs


def verify_steps(runs: list[int], depth: int) -> list[int]:
    """Accepted drafts of each verify step over one answer, from `runs` per start column.

    A step moves on by what it produced, the bonus included.

    Steps whose window reaches past the text's end are left out: what was cut off there might have been accepted.
    """
    taken, at = [], 0
    while at + depth <= len(runs):
        taken.append(min(runs[at], depth))
        at += taken[-1] + 1
    return taken


def evaluate(
    draft: Draft, samples: list[Sample], depths: tuple[int, ...] = (1, 3, 5), answers: int = 8
) -> dict[str, dict[str, dict[str, Any]]]:
    """Report per temperature ("greedy" or "temperature 1.0"), domain (and "all") and num_steps.

    "all" pools the domains' verify steps; "mean of domains" gives each the same weight.
    """
    tallies: dict[tuple[str, str, int], Tally] = {}
    deepest = max(depths)
    usable = sorted((s for s in samples if is_usable(s)), key=lambda s: s.prompt_tokens)
    for first in tqdm(range(0, len(usable), answers), desc="evaluate", unit="batch"):
        part = usable[first : first + answers]
        batch = collate(part, prompt_share=0)
        runs = agreeing_run(draft, batch, deepest)
        for row, sample in enumerate(part):
            mode = "greedy" if sample.temperature == 0 else f"temperature {sample.temperature}"
            of_sample = runs[row][batch.text[row] >= 0].tolist()
            for depth in depths:
                taken = verify_steps(of_sample, depth)
                for domain in (sample.domain, "all"):
                    key = (mode, domain, depth)
                    tallies.setdefault(key, Tally.empty(depth)).add(taken)
    report: dict[str, dict[str, dict[str, Any]]] = {}
    for (mode, domain, depth), tally in sorted(tallies.items()):
        report.setdefault(mode, {}).setdefault(f"num_steps {depth}", {})[domain] = tally.report()
    for by_depth in report.values():
        for by_domain in by_depth.values():
            lengths = [r["accepted_length"] for domain, r in by_domain.items() if domain != "all"]
            by_domain["mean of domains"] = {"accepted_length": round(sum(lengths) / len(lengths), 4)}
    return report
