"""Trains the tiny models: the target on text, a draft on what its target does with text."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tiny.drafts import Eagle, Eagle3, Mtp, rollout
from tests.tiny.model import Llama, Seen

WARMUP = 0.1  # share of the steps


def optimizer_and_scheduler(module: nn.Module, rate: float, steps: int) -> tuple[torch.optim.Optimizer, object]:
    """AdamW, and a warm-up followed by half a cosine over `steps`."""
    optimizer = torch.optim.AdamW(module.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)

    def schedule(step: int) -> float:
        done = (step + 1) / steps
        return min(done / WARMUP, 1.0) * (0.5 + 0.5 * math.cos(math.pi * min(done, 1.0)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)


def descend(module: nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer, scheduler: object) -> None:
    """One step, gradients clipped to norm 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    scheduler.step()


def fit_target(target: Llama, rows: Tensor, learn: Tensor, *, steps: int, batch: int, rate: float) -> float:
    """Next-token training on rows[N, T]; tokens with learn[N, T] False are read but not learned. Returns the last
    loss, nats a token."""
    optimizer, scheduler = optimizer_and_scheduler(target, rate, steps)
    loss = torch.zeros(())
    for step in range(steps):
        pick = torch.arange(step * batch, (step + 1) * batch) % rows.shape[0]
        tokens = rows[pick]
        labels = tokens.masked_fill(~learn[pick], -100)[:, 1:]
        loss = F.cross_entropy(target(tokens[:, :-1]).logits.flatten(0, 1), labels.flatten())
        descend(target, loss, optimizer, scheduler)
    return loss.item()


def fit_draft(
    draft: Eagle3 | Eagle | Mtp, target: Llama, rows: Tensor, *, depth: int, steps: int, batch: int, rate: float
) -> float:
    """Teach `draft` the target's distribution along chains of `depth` tokens over rows[N, T], text that the target
    wrote. Drafts that use the target's head also learn its state. Returns the last loss, nats a token."""
    target.requires_grad_(False)
    optimizer, scheduler = optimizer_and_scheduler(draft, rate, steps)
    imitates_state = isinstance(draft, Eagle)  # EAGLE's own second objective; without it the shared head hardly trains
    loss = torch.zeros(())
    for step in range(steps):
        tokens = rows[torch.arange(step * batch, (step + 1) * batch) % rows.shape[0]]
        with torch.no_grad():
            seen: Seen = target(tokens)
            wanted = seen.logits.softmax(-1)
        loss = torch.zeros(())
        for ahead, (logits, state) in enumerate(rollout(draft, target, tokens, seen, depth), 1):
            valid = tokens.shape[1] - 1 - ahead  # chains that still have text to be compared with
            goal, guess = wanted[:, ahead : ahead + valid], logits[:, :valid]
            loss = loss - (goal * guess.log_softmax(-1)).sum(-1).mean() / depth
            if imitates_state:
                distance = F.smooth_l1_loss(state[:, :valid], seen.final[:, ahead : ahead + valid])
                loss = loss + 0.5 * distance / depth
        descend(draft, loss, optimizer, scheduler)
    target.requires_grad_(True)
    return loss.item()
