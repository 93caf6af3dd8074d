"""Read an EAGLE3 checkpoint that SGLang 0.5.23 loads as the trainer's draft, or say why it is not one.

SGLang passes over tensors whose names it does not know; here every weight has to be known, and none may be missing: a
layer left at random would train and serve, only badly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from sglang_dspark.train.config import other_options, read_config
from sglang_dspark.train.export import draft_config
from sglang_dspark.train.model import Draft
from sglang_dspark.train.target import Shape

# What SGLang's `models/llama_eagle3.py` reads beside the sizes, and the one value of each that the draft computes.
PLAIN_DRAFT = {
    "num_hidden_layers": 1,
    "num_aux_hidden_states": 3,
    "use_aux_hidden_state": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "use_aux_norm": False,
    "norm_output": False,
    "tie_word_embeddings": False,
}
# Of config.json, what a draft has in common with its target.
SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
)


def import_draft(folder: Path, shape: Shape, embed: Tensor, aux_scale: Tensor | None = None) -> Draft:
    """The draft in `folder`, to measure or go on from what is shipped.

    shape, embed: the target's; an empty embed will do to see whether the draft can be read. aux_scale [captured layers]
    is taken out of fc again, so that fitting goes on at the scale it began with.

    Raises:
        ValueError: one sentence; the draft is damaged, for another target, or computes what the trainer's does not.
        OSError: of the system, where a file is missing.
    """
    size = _checked_size(folder, shape)
    state = _read_state(folder)
    draft_tokens = _draft_tokens(folder, state, size, shape.vocab)
    scale = torch.ones(len(shape.default_aux_layers)) if aux_scale is None else aux_scale
    draft = Draft(shape, embed, draft_tokens, scale)
    _check_tensors(folder, state, draft)
    state["fc.weight"] = state["fc.weight"].float() / scale.repeat_interleave(shape.hidden)
    weights = {name: weight.float() for name, weight in state.items()}
    draft.load_state_dict({**weights, "aux_scale": scale, "draft_tokens": draft_tokens})
    return draft.eval()


def _checked_size(folder: Path, shape: Shape) -> int:
    """The draft's vocabulary, by a config.json that asks for nothing but what the trainer's draft computes."""
    config = read_config(folder)
    found, wanted = (draft_config(s, 0, torch.float32) for s in (Shape.read(folder), shape))
    for name in SHARED:
        if found[name] != wanted[name]:
            raise ValueError(
                f"{folder}: its {name} is {found[name]}, and the target's {wanted[name]}; take a draft made for this "
                "target, of a layer like its own"
            )
    # Some options stand in either place; in both, the inner one counts.
    options: dict[str, Any] = {**config, **(config.get("eagle_config") or {})}
    other = other_options(options, {**PLAIN_DRAFT, "target_hidden_size": shape.hidden})
    layers = options.get("eagle_aux_hidden_state_layer_ids")
    # Counted by what a layer puts out, so one less than the states that come in.
    if layers is not None and sorted(layers) != sorted(layer - 1 for layer in shape.default_aux_layers):
        other.append(f"eagle_aux_hidden_state_layer_ids {layers}")
    if other:
        raise ValueError(
            f"{folder}: its config.json has {', '.join(other)}, which the trainer's draft does not compute; take a "
            "draft without"
        )
    size = config.get("draft_vocab_size")
    if not isinstance(size, int) or not 1 <= size <= shape.vocab:
        raise ValueError(
            f"{folder}: its draft_vocab_size is {size}, not 1 to the target's {shape.vocab}; take a draft with a head "
            "of its own, made for this target"
        )
    return size


def _read_state(folder: Path) -> dict[str, Tensor]:
    """The tensors under the trainer's names. SGLang takes them with and without `model.`, and the layer under two."""
    path = folder / "model.safetensors"
    try:
        state = load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); fetch the draft again") from error
    names = {name: name.removeprefix("model.") for name in state}
    own = {n: f"midlayer.{s.removeprefix('layers.0.')}" if s.startswith("layers.0.") else s for n, s in names.items()}
    return {own[name]: tensor for name, tensor in state.items() if own[name] != "embed_tokens.weight"}


def _draft_tokens(folder: Path, state: dict[str, Tensor], size: int, vocab: int) -> Tensor:
    """Target ids of the draft's tokens, int64 [size], by d2t and t2d, which are taken out of `state`.

    SGLang reads d2t alone; without it the draft's ids are the target's.
    """
    offsets = state.pop("d2t", torch.zeros(vocab, dtype=torch.int64))
    sayable = state.pop("t2d", torch.ones(vocab, dtype=torch.bool))
    tokens = offsets.long() + torch.arange(offsets.numel())
    inside = tokens[(tokens >= 0) & (tokens < vocab)].unique()
    right = tokens.numel() == inside.numel() == size and sayable.numel() == vocab and bool(sayable[inside].all())
    if not right:
        raise ValueError(
            f"{folder}: its d2t and t2d do not describe {size} of the target's {vocab} tokens; take a draft made for "
            "this target"
        )
    return tokens


def _check_tensors(folder: Path, state: dict[str, Tensor], draft: Draft) -> None:
    wanted = {name: tuple(weight.shape) for name, weight in draft.named_parameters()}
    found = {name: tuple(weight.shape) for name, weight in state.items()}
    faults = [f"no {name}" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"an unknown {name}" for name in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{name} of shape {found[name]}, not {wanted[name]}"
        for name in sorted(wanted.keys() & found.keys())
        if found[name] != wanted[name]
    ]
    if faults:
        more = f" and {len(faults) - 3} more faults" if len(faults) > 3 else ""
        raise ValueError(
            f"{folder}: its model.safetensors has {', '.join(faults[:3])}{more}; take an EAGLE3 draft of one layer"
        )
