"""Plays speculative decoding offline: how many draft tokens a greedy chain gets accepted, step by step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.tiny.drafts import Eagle, Eagle3, Mtp, rollout
from tests.tiny.model import Llama


@dataclass
class Chains:
    """Chains from every position of greedy texts[B, T]. hits[B, N, steps]: whether the k-th token of the chain that
    starts at position i equals the text, for the N positions whose whole chain lies in the text."""

    hits: Tensor

    def accepted(self, steps: int) -> Tensor:
        """int64 [B, N]: leading hits among the first `steps` tokens of each chain."""
        return self.hits[..., :steps].long().cumprod(-1).sum(-1)


@torch.no_grad()
def draft_chains(draft: Eagle3 | Eagle | Mtp, target: Llama, texts: Tensor, steps: int, own: Tensor) -> Chains:
    """Draft from every position of texts[B, T]; `own` maps draft ids to token ids."""
    drafted = [own[logits.argmax(-1)] for logits, _ in rollout(draft, target, texts, target(texts), steps, own)]
    whole = texts.shape[1] - 1 - steps
    hits = [tokens[:, :whole] == texts[:, k + 2 : k + 2 + whole] for k, tokens in enumerate(drafted)]
    return Chains(torch.stack(hits, -1))


def mean_accepted_length(chains: Chains, steps: int, prompt: int) -> float:
    """Tokens per verify step, the bonus included, when every row is decoded from position `prompt` - 1 on."""
    produced = verified = 0
    for row in chains.accepted(steps).tolist():
        position = prompt - 1
        while position < len(row):
            produced += row[position] + 1
            verified += 1
            position += row[position] + 1
    return produced / verified
