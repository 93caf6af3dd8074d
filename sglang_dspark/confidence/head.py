"""Equation 7 for chain drafts: how likely a draft token is accepted, from the hidden state that it is drawn from.

One linear map over the draft's hidden state, the embedding of the token before and what the draft's distribution shows.
All of it is known before the token is drawn, as sampled drafts need to stay exact.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sglang_dspark.confidence.features import FEATURES
from sglang_dspark.files import written_whole

# Where a draft's folder carries its head. Not beside the draft's own weights: SGLang loads every *.safetensors there.
HEAD_FILE = Path("dspark") / "confidence_head.safetensors"
# How a token is drafted and verified decides what is accepted: the target's argmax against the draft's; a sample of the
# target against the draft's argmax; a sample of the draft accepted by rejection sampling, 1 - TV (equation 8).
HEAD_RULES = ("greedy", "sampled", "drawn")
FORMAT = "1"
# Log-odds, margins and entropies are cut here, in nats: a certain draft's are huge, and beyond it tell nothing more.
FEATURE_LIMIT = 16.0
_NAMES = {"weight": "confidence_head.proj.weight", "bias": "confidence_head.proj.bias"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def head_inputs(hidden: Tensor, features: Tensor) -> Tensor:
    """[..., H] and [..., features] to [..., H + features] float32: the hidden state at unit RMS, the features cut.

    The residual stream's length grows along a chain and says little of its own; NaN stays NaN.
    """
    hidden = hidden.float()
    hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    return torch.cat([hidden, features.float().clamp(-FEATURE_LIMIT, FEATURE_LIMIT)], dim=-1)


class ConfidenceHead(nn.Module):
    """The map, with the embedding's part of it already multiplied out: a logit per vocabulary entry and rule.

    proj float32 [rules, H + features]; token_logits float32 [vocab, rules], the bias included.
    """

    token_logits: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, hidden: int, embed: Tensor) -> None:
        """weight [rules, H + E + features], bias [rules]; embed [vocab, E], the draft's token embedding."""
        super().__init__()
        width = embed.shape[1]
        of_hidden, of_token, of_features = weight.float().split([hidden, width, len(FEATURES)], dim=1)
        self.proj = nn.Linear(hidden + len(FEATURES), len(HEAD_RULES), bias=False, device=embed.device)
        self.proj.weight = nn.Parameter(torch.cat([of_hidden, of_features], dim=1).to(embed.device), False)
        # By parts: a float32 copy of a large vocabulary's whole embedding would take gigabytes.
        parts = [
            part.float() @ of_token.to(embed.device).T + bias.float().to(embed.device) for part in embed.split(8192)
        ]
        self.register_buffer("token_logits", torch.cat(parts), persistent=False)

    def forward(self, hidden: Tensor, token: Tensor, features: Tensor) -> Tensor:
        """Confidence logits [..., rules] float32, in the order of HEAD_RULES; sigmoid gives the probability.

        hidden [..., H], any float: the draft forward's `hidden_states`, before its final norm. token [...] int64: the
        token that was fed to that forward. features [..., features]: draft_features of its logits. Any leading shape,
        all positions at once or one; reads nothing back from the device.
        """
        return self.of_inputs(head_inputs(hidden, features), token)

    def of_inputs(self, inputs: Tensor, token: Tensor) -> Tensor:
        """As forward, of head_inputs [..., H + features]."""
        return self.proj(inputs) + self.token_logits[token]

    @classmethod
    def load(cls, path: Path, *, hidden: int, embed: Tensor) -> ConfidenceHead:
        """The head at `path` (a file, or a draft's folder), for a draft of this hidden size and embedding [vocab, E].

        ValueError says in one sentence why a file is not taken; FileNotFoundError when there is none.
        """
        weight, bias = read_head(path, hidden=hidden, width=embed.shape[1])
        return cls(weight, bias, hidden, embed)


def read_head(path: Path, *, hidden: int, width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of a head, checked for a draft of this hidden size and embedding width; raises as `load` does."""
    if path.is_dir():
        path = path / HEAD_FILE
    with path.open("rb") as file:
        if file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise ValueError(f"{path}: a pickled file, which is never read; a confidence head is a safetensors file")
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a mapping
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); fetch or train the head again") from error
    return _checked(path, metadata, state, hidden, width)


def _checked(
    path: Path, metadata: dict[str, str], state: dict[str, Tensor], hidden: int, width: int
) -> tuple[Tensor, Tensor]:
    expected = {
        "format": FORMAT,
        "rules": json.dumps(HEAD_RULES),
        "features": json.dumps(FEATURES),
        "hidden_size": str(hidden),
        "embedding_size": str(width),
    }
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise ValueError(
                f"{path}: its {key} is {metadata.get(key, 'not given')}, not {value}; "
                "take the head that was trained for this draft and this version"
            )
    if set(state) != set(_NAMES.values()):
        raise ValueError(f"{path}: holds {sorted(state)}, not {sorted(_NAMES.values())}; not a confidence head")
    weight, bias = state[_NAMES["weight"]], state[_NAMES["bias"]]
    shapes = {"weight": (len(HEAD_RULES), hidden + width + len(FEATURES)), "bias": (len(HEAD_RULES),)}
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{path}: {_NAMES[name]} has the shape {tuple(tensor.shape)}, not {shapes[name]}")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{path}: {_NAMES[name]} has the type {tensor.dtype}, not float32, bfloat16 or float16")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{path}: {_NAMES[name]} holds NaN or infinite numbers; train the head again")
    return weight, bias


def save_head(path: Path, weight: Tensor, bias: Tensor, hidden: int) -> None:
    """Write a head as float32: weight [rules, H + E + features] in that order of columns, bias [rules].

    Atomically and readable by the owner only.
    """
    metadata = {
        "format": FORMAT,
        "rules": json.dumps(HEAD_RULES),
        "features": json.dumps(FEATURES),
        "hidden_size": str(hidden),
        "embedding_size": str(weight.shape[1] - hidden - len(FEATURES)),
    }
    state = {_NAMES["weight"]: weight.float().contiguous(), _NAMES["bias"]: bias.float().contiguous()}
    with written_whole(path) as file:
        save_file(state, file, metadata=metadata)
