"""Train the confidence head of a frozen draft, and judge it.

Weighted logistic regression; how strongly its weights decay is chosen on answers left out of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.confidence.features import FEATURES
from sglang_dspark.confidence.head import HEAD_FILE, HEAD_RULES, ConfidenceHead, save_head
from sglang_dspark.confidence.reliability import auc, calibration_error
from sglang_dspark.train.examples import Examples

# Weight decay on standardised inputs, of the mean loss.
DECAYS = (1e-2, 3e-2, 1e-1, 3e-1, 1.0)
# What the distribution shows is a handful of trusted inputs against a thousand noisy ones: decayed this much less.
FEATURE_DECAY = 0.01
VALIDATION = 5  # every fifth answer


def _columns(examples: Examples, embed: Tensor) -> Tensor:
    """The map's inputs in the order of its columns, [n, H + E + features]."""
    hidden = examples.inputs.shape[1] - len(FEATURES)
    return torch.cat([examples.inputs[:, :hidden], embed[examples.token], examples.inputs[:, hidden:]], dim=1)


def _solve(x: Tensor, truth: Tensor, weight: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Minimise the weighted mean cross-entropy plus decay * |w|^2 / 2; x [n, d] standardised -> (w [d], bias [])."""
    w = torch.zeros(x.shape[1], requires_grad=True)
    bias = torch.logit((truth * weight).sum() / weight.sum(), eps=1e-4).clone().requires_grad_()
    strength = torch.full_like(w, decay)
    strength[-len(FEATURES) :] *= FEATURE_DECAY
    share = weight / weight.sum()
    optimizer = torch.optim.LBFGS([w, bias], max_iter=60, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        entropy = F.binary_cross_entropy_with_logits(x @ w + bias, truth, reduction="none")
        total = (entropy * share).sum() + 0.5 * (strength * w.square()).sum()
        total.backward()
        return total

    optimizer.step(loss)
    return w.detach(), bias.detach()


def fit_head(examples: Examples, embed: Tensor, out: Path) -> tuple[ConfidenceHead, dict[str, Any]]:
    """Fit a head and write it under the draft's folder `out`; returns it as it loads, and what was chosen.

    embed float32 [vocab, E]. ValueError when a rule has too few examples to choose its decay by.
    """
    columns = _columns(examples, embed)
    mean, deviation = columns.mean(0), columns.std(0).clamp(min=1e-4)
    weights, biases, chosen = [], [], {}
    for index, rule in enumerate(HEAD_RULES):
        mine = examples.of(rule)
        x = (columns[mine] - mean) / deviation
        truth, weight = examples.truth[mine, index], examples.weight[mine, index]
        kept = examples.answer[mine] % VALIDATION != 0
        if not bool(kept.any()) or bool(kept.all()):
            raise ValueError(f"too few answers to learn the rule {rule!r} from: generate more, greedy and sampled ones")
        losses = {}
        for decay in DECAYS:
            w, b = _solve(x[kept], truth[kept], weight[kept], decay)
            entropy = F.binary_cross_entropy_with_logits(x[~kept] @ w + b, truth[~kept], reduction="none")
            losses[decay] = float((entropy * weight[~kept]).sum() / weight[~kept].sum())
        best = min(losses, key=losses.__getitem__)
        chosen[rule] = {"examples": int(mine.sum()), "decay": best, "left_out_loss": round(losses[best], 4)}
        w, b = _solve(x, truth, weight, best)
        weights.append(w / deviation)
        biases.append(b - (w * mean / deviation).sum())
    hidden = examples.inputs.shape[1] - len(FEATURES)
    path = out / HEAD_FILE
    save_head(path, torch.stack(weights), torch.stack(biases), hidden)
    return ConfidenceHead.load(path, hidden=hidden, embed=embed), {**chosen, "bytes": path.stat().st_size}


@torch.inference_mode()
def judge(head: ConfidenceHead, examples: Examples) -> dict[str, Any]:
    """AUC and calibration error of a reached token's acceptance by rule, domain (and "all") and position.

    Of the head, and of the draft's largest probability alone.
    """
    logits = head.of_inputs(examples.inputs, examples.token)
    top = torch.sigmoid(examples.inputs[:, -len(FEATURES)])  # the first feature is its log-odds
    report: dict[str, Any] = {}
    for index, rule in enumerate(HEAD_RULES):
        for number, domain in enumerate(("all", *examples.domains)):
            of_domain = examples.of(rule) & ((examples.domain == number - 1) | (number == 0))
            for position in range(int(examples.position.max()) + 1):
                chosen = of_domain & (examples.position == position)
                truth, weight = (part[chosen, index].numpy() for part in (examples.truth, examples.weight))
                row = {"examples": round(float(weight.sum()))}
                for name, said in (("head", torch.sigmoid(logits[chosen, index])), ("top", top[chosen])):
                    probability = said.numpy()
                    row[f"{name}_auc"] = round(auc(probability, truth, weight), 4)
                    row[f"{name}_ece"] = round(calibration_error(probability, truth, weight=weight), 4)
                report.setdefault(rule, {}).setdefault(domain, []).append(row)
    return report
