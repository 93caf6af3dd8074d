"""What a frozen draft showed and what became of it: what a confidence head learns from and is judged by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from sglang_dspark.confidence.features import draft_features
from sglang_dspark.confidence.head import HEAD_RULES, head_inputs
from sglang_dspark.train.batches import collate, is_usable
from sglang_dspark.train.model import Draft
from sglang_dspark.train.store import Sample
from sglang_dspark.train.target import Target


@dataclass(frozen=True)
class Examples:
    """n draft positions of chains started in answers, each reached by an accepted prefix.

    inputs float32 [n, H + features] (head_inputs); token int64 [n], fed to the draft; truth float32 [n, rules], the
    chance of acceptance under each rule given the context; weight float32 [n, rules], how likely the rule's verify
    would have come here; position int64 [n] from 0; chain, answer int64 [n], numbers of the chain and its answer; warm
    bool [n], whether the answer was sampled; domain int64 [n], an index into `domains`.
    """

    inputs: Tensor
    token: Tensor
    truth: Tensor
    weight: Tensor
    position: Tensor
    chain: Tensor
    answer: Tensor
    warm: Tensor
    domain: Tensor
    domains: tuple[str, ...]

    def of(self, rule: str) -> Tensor:
        """Which examples the rule is trained and judged on, bool [n]: reached, and in the text that it verifies."""
        warm = self.warm if rule != "greedy" else ~self.warm
        return warm & (self.weight[:, HEAD_RULES.index(rule)] > 0)


@torch.inference_mode()
def gather(draft: Draft, target: Target, samples: list[Sample], depth: int, answers: int = 8) -> Examples:
    """Run chains of `depth` over the answers.

    A chain goes on along the text. Argmax drafts come further only where they equal it; drafts that are sampled do with
    the chance min(1, q / p) of the text's token, which makes the weighted contexts those of rejection sampling: the
    text's token has probability p, and p * min(1, q / p) = q * min(1, p / q).
    """
    usable = sorted((s for s in samples if is_usable(s)), key=lambda s: s.prompt_tokens)
    domains = tuple(sorted({s.domain for s in usable}))
    parts: list[tuple[Tensor, ...]] = []
    chains_before = 0
    for first in tqdm(range(0, len(usable), answers), desc="examples", unit="batch"):
        part = usable[first : first + answers]
        batch = collate(part, prompt_share=0)
        p = torch.softmax(target.logits(batch.final), dim=-1)
        best, sayable = p.argmax(-1), p[:, draft.draft_tokens]
        warm = torch.tensor([s.temperature > 0 for s in part])[batch.row]
        domain = torch.tensor([domains.index(s.domain) for s in part])[batch.row]
        chain = torch.arange(batch.row.numel())
        at, weight = batch.at, torch.ones(chain.numel(), len(HEAD_RULES))
        chains = draft.begin(batch.pairs, batch.row, batch.start)
        for step in range(depth):
            column = chains.start + step
            text = batch.text[chains.row, column]
            q = torch.softmax(chains.logits, dim=-1)
            drafted = draft.draft_tokens[q.argmax(-1)]
            here = at + step
            truth = torch.stack(
                [(drafted == best[here]).float(), p[here, drafted], torch.minimum(sayable[here], q).sum(-1)],
                dim=1,
            )
            inputs = head_inputs(chains.stream, draft_features(chains.logits))
            fed = batch.pairs.tokens[chains.row, column]
            position = torch.full_like(chain, step)
            answer = first + chains.row
            parts.append(
                (inputs, fed, truth, weight, position, chains_before + chain, answer, warm[chain], domain[chain])
            )
            if step + 1 == depth:
                break
            equal = (drafted == text).float()
            q_text = _of_text(q, draft, text)
            onward = torch.stack(
                [equal * truth[:, 0], equal, (q_text / p[here, text].clamp(min=1e-9)).clamp(max=1.0)], dim=1
            )
            weight = weight * onward
            ahead = batch.text[chains.row, (column + 1).clamp(max=batch.text.shape[1] - 1)]
            keep = (column + 1 < batch.text.shape[1]) & (ahead >= 0) & (weight > 1e-3).any(1)
            if not keep.any():
                break
            chains = draft.advance(chains, keep)
            at, weight, chain = at[keep], weight[keep], chain[keep]
        chains_before += batch.row.numel()
    return Examples(*(torch.cat(column) for column in zip(*parts, strict=True)), domains)


def _of_text(q: Tensor, draft: Draft, text: Tensor) -> Tensor:
    """q of the text's token [n], 0 where the draft cannot say it."""
    to_draft = torch.full((draft.shape.vocab,), -1)
    to_draft[draft.draft_tokens] = torch.arange(draft.draft_tokens.numel())
    at = to_draft[text]
    return torch.where(at >= 0, q.gather(1, at.clamp(min=0)[:, None])[:, 0], 0.0)
