"""What a draft's distribution shows before a token is drawn from it."""

from __future__ import annotations

import torch
from torch import Tensor

FEATURES = ("logit", "margin", "entropy")


def draft_features(logits: Tensor) -> Tensor:
    """[R, V] logits, any float, to [R, 3] float32: what :data:`FEATURES` names, in nats.

    logit: log-odds of the most likely token, about 80 where it has everything. margin: its logit less the second's.
    entropy: of the whole distribution. They depend on the distribution alone, never on what is sampled from it. A row
    with NaN gives NaN. One exp over the vocabulary, three reductions over its result.
    """
    best, at = logits.float().max(-1, keepdim=True)
    below = (logits - best).clamp_(min=-80.0)  # exp of less is 0; -inf (a token ruled out) would make 0 * inf below
    others = below.exp().scatter_(-1, at, 0.0)
    rest = others.sum(-1)
    entropy = torch.log1p(rest) - torch.linalg.vecdot(others, below) / (1 + rest)
    return torch.stack([-rest.log(), -others.amax(-1).log(), entropy], dim=-1)
