"""Writes and reads Hugging Face folders of the tiny models, with the weight names that SGLang's classes expect."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny.drafts import Eagle, Eagle3, Mtp
from tests.tiny.dspark import MASK, DSpark
from tests.tiny.model import NORM_EPS, ROPE_THETA, Llama, Shape

AUX_LAYERS = [0, 1, 2]  # SGLang captures the stream that enters layer id + 1, so the last id stays below layers - 1
MTP_PREFIX = "model.mtp_layers.0."


def _config(architecture: str, shape: Shape, end: int, **extra: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": end,
        **extra,
    }


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({n: w.detach().contiguous() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def _read(folder: Path) -> tuple[Shape, dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    return shape, config, load_file(folder / "model.safetensors")


def save_target(target: Llama, folder: Path, end: int) -> None:
    """A LlamaForCausalLM checkpoint; `end` is the end-of-sequence token id."""
    _write(folder, _config("LlamaForCausalLM", target.shape, end), target.state_dict())


def save_eagle3(draft: Eagle3, shape: Shape, folder: Path, end: int, kept: Tensor | None = None) -> None:
    """A LlamaForCausalLMEagle3 checkpoint. `kept`, int64 ascending token ids, is the draft vocabulary; None keeps the
    target's whole vocabulary and writes no d2t."""
    weights = dict(draft.state_dict())
    if kept is not None:
        weights["lm_head.weight"] = weights["lm_head.weight"][kept]
        weights["d2t"] = kept - torch.arange(len(kept))
        weights["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, kept, True)
    config = _config(
        "LlamaForCausalLMEagle3",
        shape,
        end,
        num_hidden_layers=1,
        draft_vocab_size=len(weights["lm_head.weight"]),
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": AUX_LAYERS},
    )
    _write(folder, config, weights)


def save_eagle(draft: Eagle, shape: Shape, folder: Path, end: int) -> None:
    """A LlamaForCausalLMEagle checkpoint; embedding and head come from the target."""
    _write(folder, _config("LlamaForCausalLMEagle", shape, end, num_hidden_layers=1), draft.state_dict())


def save_dspark(draft: DSpark, shape: Shape, folder: Path, end: int) -> None:
    """A Qwen3DSparkModel checkpoint; embedding and head come from the target."""
    config = _config(
        "Qwen3DSparkModel",
        shape,
        end,
        model_type="qwen3",
        num_hidden_layers=1,
        num_target_layers=shape.layers,
        target_layer_ids=AUX_LAYERS,
        block_size=draft.gamma,
        mask_token_id=MASK,
        markov_rank=draft.rank,
        markov_head_type="vanilla",
        enable_confidence_head=True,
    )
    _write(folder, config, draft.state_dict())


def load_dspark(folder: Path) -> DSpark:
    """The draft of a checkpoint that save_dspark wrote."""
    shape, config, weights = _read(folder)
    draft = DSpark(shape, config["block_size"], config["markov_rank"])
    draft.load_state_dict(weights)
    return draft


def save_nextn(target: Llama, draft: Mtp, folder: Path, end: int) -> None:
    """A MiMoForCausalLM checkpoint: `target` as a Qwen2 whose q, k and v biases are zero, and one MTP layer."""
    weights = dict(target.state_dict())
    for name in list(weights):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.replace(".weight", ".bias")] = torch.zeros(len(weights[name]))
    weights.update({MTP_PREFIX + name: weight for name, weight in draft.state_dict().items()})
    config = _config("MiMoForCausalLM", target.shape, end, model_type="qwen2", num_nextn_predict_layers=1)
    _write(folder, config, weights)


def load_target(folder: Path) -> Llama:
    """The target of a checkpoint that save_target or save_nextn wrote."""
    shape, _, weights = _read(folder)
    target = Llama(shape)
    target.load_state_dict({n: w for n, w in weights.items() if n in target.state_dict()})
    return target


def load_draft(folder: Path) -> tuple[Eagle3 | Eagle | Mtp, Tensor]:
    """A draft and `own`, the token id of each of its output ids, int64 [draft vocab]."""
    shape, config, weights = _read(folder)
    architecture = config["architectures"][0]
    own = torch.arange(config.get("draft_vocab_size", shape.vocab))
    if "d2t" in weights:
        own = own + weights.pop("d2t")
        weights.pop("t2d")
    draft: Eagle3 | Eagle | Mtp
    if architecture == "LlamaForCausalLMEagle3":
        draft = Eagle3(shape)
        draft.lm_head = nn.Linear(shape.hidden, len(own), bias=False)
    elif architecture == "LlamaForCausalLMEagle":
        draft = Eagle(shape)
    else:
        draft = Mtp(shape)
        weights = {n.removeprefix(MTP_PREFIX): w for n, w in weights.items() if n.startswith(MTP_PREFIX)}
    draft.load_state_dict(weights)
    return draft, own
