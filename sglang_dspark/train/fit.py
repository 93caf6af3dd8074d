"""Fit the draft to the target's answers: distillation over a multi-step rollout ("training-time test" of EAGLE3).

Two or more processes of one thread each share a step's batch and average their gradients; see generate.py for why.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from sglang_dspark.files import written_whole
from sglang_dspark.train.batches import Batch, collate, epoch, is_usable
from sglang_dspark.train.generate import keep_freed_memory
from sglang_dspark.train.load import import_draft
from sglang_dspark.train.model import Draft, draft_from_target
from sglang_dspark.train.store import Sample, load_samples
from sglang_dspark.train.target import Target
from sglang_dspark.train.vocab import choose_draft_tokens, token_counts


@dataclass(frozen=True)
class Fitting:
    """What decides the fitted weights, together with the generated data."""

    seed: int = 0
    # 4,864 rows: with the layer of SmolLM2-135M 15.9 MB in bf16, under the 16 MB a repository can carry.
    draft_vocab: int = 4864
    epochs: int = 6
    answers_per_step: int = 8
    steps: int = 4
    # Chains started inside the prompts, whose hidden states come with the prefill anyway; drawn anew every epoch.
    prompt_share: float = 0.5
    # Below 1 the wanted distribution is sharpened toward the target's argmax, which is all that greedy drafts are for.
    teacher_temperature: float = 1.0
    # Of the answers that the draft gone on from was fitted to, so many are drawn in each epoch: it knows them by heart.
    known_share: float = 0.25
    learning_rate: float = 2e-3
    warmup: float = 0.04  # share of all steps
    weight_decay: float = 0.05
    # The head starts as the target's own rows, which generalise to tokens the training text hardly shows.
    head_rate: float = 0.25


@torch.no_grad()
def measure_aux_scale(samples: list[Sample], layers: int) -> Tensor:
    """1 / RMS of each captured layer, [layers]; the median over tokens, since the first token is 1,000 times larger."""
    rms = torch.cat([s.aux.float().unflatten(-1, (layers, -1)).square().mean(-1).sqrt() for s in samples])
    return 1.0 / rms.median(dim=0).values


def plan_steps(known: list[Sample], fresh: list[Sample], options: Fitting) -> list[list[Sample]]:
    """The answers of every step: in each epoch all the fresh ones, and a seeded choice of the known."""
    steps = []
    for number in range(options.epochs):
        seed = options.seed + number
        order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
        drawn = [known[i] for i in order[: round(len(known) * options.known_share)].tolist()]
        steps += list(epoch(drawn + fresh, options.answers_per_step, seed))
    return steps


class Objective:
    """Rollout loss of a batch; holds the target's head over the draft vocabulary and the map of target to draft ids."""

    def __init__(self, target: Target, draft_tokens: Tensor, options: Fitting) -> None:
        self.head = target.head[draft_tokens]
        self.to_draft = torch.full((target.shape.vocab,), -1)
        self.to_draft[draft_tokens] = torch.arange(draft_tokens.numel())
        self.steps = options.steps
        self.teacher_temperature = options.teacher_temperature

    def __call__(self, draft: Draft, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss, acceptance [steps]): acceptance is the share of reached draft tokens in answers that are the text's.

        Step s is trained on the chains whose first s drafts were right, which are the only ones that serving takes
        that far; that also spares half of the work. The wanted distribution is the target's over the draft vocabulary;
        a token that the draft cannot say is no example.
        """
        with torch.no_grad():
            wanted = torch.softmax(F.linear(batch.final, self.head / self.teacher_temperature), dim=-1)
        at, answers = batch.at, batch.answer
        chains = draft.begin(batch.pairs, batch.row, batch.start)
        losses, acceptance = [], []
        for step in range(self.steps):
            text = batch.text[chains.row, chains.start + step]
            label = self.to_draft[text]
            sayable = label >= 0
            entropy = F.cross_entropy(chains.logits[sayable], wanted[(at + step)[sayable]], reduction="sum")
            losses.append(entropy / batch.at.numel())
            hit = (chains.logits.detach().argmax(-1) == label) & sayable
            acceptance.append(hit[answers].sum() / answers.sum().clamp(min=1))
            if step + 1 == self.steps:
                break
            last = chains.start + step + 1 >= batch.text.shape[1]
            ahead = batch.text[chains.row, (chains.start + step + 1).clamp(max=batch.text.shape[1] - 1)]
            keep = hit & ~last & (ahead >= 0)
            if not keep.any():
                acceptance += [torch.zeros(())] * (self.steps - step - 1)
                break
            chains, at, answers = draft.advance(chains, keep), at[keep], answers[keep]
        return torch.stack(losses).sum(), torch.stack(acceptance)


def learning_rate(progress: float, options: Fitting) -> float:
    """Factor on the peak rate at `progress` in [0, 1]: linear warmup, then a half cosine to 0."""
    if progress < options.warmup:
        return progress / options.warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - options.warmup) / (1 - options.warmup)))


def _optimizer(draft: Draft, options: Fitting) -> torch.optim.AdamW:
    head = list(draft.lm_head.parameters())
    matrices = [p for name, p in draft.named_parameters() if p.dim() > 1 and not name.startswith("lm_head")]
    norms = [p for p in draft.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay, "scale": 1.0},
        {"params": head, "weight_decay": 0.0, "scale": options.head_rate},
        {"params": norms, "weight_decay": 0.0, "scale": 1.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def average_gradients(draft: Draft, workers: int) -> None:
    """Replace every gradient by its mean over the processes."""
    gradients = [p.grad for p in draft.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for g, mean in zip(gradients, (flat / workers).split([g.numel() for g in gradients]), strict=True):
        g.copy_(mean.view_as(g))


def _fit_rank(
    rank: int,
    workers: int,
    rendezvous: str,
    target_folder: Path,
    shards: list[Path],
    out: Path,
    options: Fitting,
    start: Path | None,
    known: int,
) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=workers)
    target = Target(target_folder)
    old, fresh = ([s for s in load_samples(part) if is_usable(s)] for part in (shards[:known], shards[known:]))
    samples = old + fresh
    scale = measure_aux_scale(samples[:: max(1, len(samples) // 64)], len(target.aux_layers))
    if start is not None:
        draft = import_draft(start, target.shape, target.embed, scale).train()
    else:
        draft_tokens = choose_draft_tokens(token_counts(samples, target.shape.vocab), options.draft_vocab)
        draft = draft_from_target(target, draft_tokens, scale, options.seed)
    objective = Objective(target, draft.draft_tokens, options)
    optimizer = _optimizer(draft, options)
    batches = plan_steps(old, fresh, options)
    for parameter in draft.parameters():
        parameter.grad = torch.zeros_like(parameter)
    log = []
    began = time.monotonic()
    bar = tqdm(batches, desc="fit", unit="step", disable=rank > 0, mininterval=5)
    for step, chosen in enumerate(bar):
        factor = learning_rate((step + 1) / len(batches), options)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * group["scale"] * factor
        mine = chosen[rank::workers]
        loss, acceptance = torch.zeros(()), torch.zeros(options.steps)
        optimizer.zero_grad(set_to_none=False)
        if mine:  # the last batch of an epoch may be smaller than the number of processes
            loss, acceptance = objective(draft, collate(mine, options.prompt_share, seed=options.seed + step))
            loss.backward()
        average_gradients(draft, workers)
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            log.append({"step": step, "loss": loss.item(), "acceptance": acceptance.tolist()})
            bar.set_postfix(loss=f"{loss.item():.3f}", accept="/".join(f"{a:.2f}" for a in acceptance.tolist()))
            if (step + 1) % max(1, len(batches) // (4 * options.epochs)) == 0 or step + 1 == len(batches):
                _save(out, draft, log, time.monotonic() - began, finished=step + 1 == len(batches))
    dist.destroy_process_group()


def _save(out: Path, draft: Draft, log: list[dict[str, object]], seconds: float, finished: bool) -> None:
    """The draft so far (state dict without the target's embedding) and the loss curve."""
    scratch = out / "draft.partial"
    torch.save(draft.state_dict(), scratch)
    scratch.rename(out / "draft.pt")
    record = {"finished": finished, "seconds": round(seconds, 1), "steps": log}
    with written_whole(out / "fit.json") as file:
        file.write_text(json.dumps(record) + "\n")


def is_finished(out: Path) -> bool:
    """Whether a fit came to its end; one whose log cannot be read, as of a machine that stopped, is done again."""
    try:
        return json.loads((out / "fit.json").read_text())["finished"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def fit(
    target: Path,
    shards: list[Path],
    work: Path,
    options: Fitting,
    workers: int,
    start: Path | None = None,
    known: int = 0,
) -> Path:
    """Train on the samples of `shards`, or find it done; returns the folder of draft.pt and fit.json under `work`.

    Both are written four times an epoch, so that a usable draft exists early. `start` is the folder of an exported
    draft to go on from, with its vocabulary, in place of one made from the target's layers; `known` says how many of
    the first shards it was fitted to.
    """
    names = [f"{shard.parent.name}/{shard.name}" for shard in shards]
    weights = None if start is None else hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()
    content = json.dumps([names, asdict(options), workers, weights, known])
    out = work / f"fit-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if is_finished(out):
        return out
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (workers, f"{scratch}/rendezvous", target, shards, out, options, start, known)
        if workers == 1:
            _fit_rank(0, *arguments)
        else:
            mp.spawn(_fit_rank, arguments, nprocs=workers)
    return out


def load_draft(folder: Path, target: Target) -> Draft:
    """The draft of a fit's folder, beside its target's embedding."""
    state = torch.load(folder / "draft.pt", weights_only=True)
    draft = Draft(target.shape, target.embed, state["draft_tokens"], state["aux_scale"])
    draft.load_state_dict(state)
    return draft.eval()
