"""Write a fitted draft as the EAGLE3 checkpoint that SGLang 0.5.23 loads as it is (`models/llama_eagle3.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.confidence.head import HEAD_FILE
from sglang_dspark.train.model import Draft
from sglang_dspark.train.target import Shape


def draft_config(shape: Shape, draft_vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the draft. The captured layers are SGLang's default, so they are not named."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "vocab_size": shape.vocab,
        "draft_vocab_size": draft_vocab,
        "bos_token_id": shape.bos,
        "eos_token_id": shape.eos[0] if len(shape.eos) == 1 else list(shape.eos),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def exported_state(draft: Draft, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the checkpoint.

    The scale of the captured states is folded into fc; the embedding is the target's, which SGLang shares, and is left
    out. d2t holds differences: target id = draft id + d2t[draft id].
    """
    state = {name: parameter.detach() for name, parameter in draft.named_parameters()}
    state["fc.weight"] = state["fc.weight"] * draft.aux_scale.repeat_interleave(draft.shape.hidden)
    state = {name: weight.to(dtype).contiguous() for name, weight in state.items()}
    sayable = torch.zeros(draft.shape.vocab, dtype=torch.bool)
    sayable[draft.draft_tokens] = True
    state["d2t"] = draft.draft_tokens - torch.arange(draft.draft_tokens.numel())
    state["t2d"] = sayable
    return state


def export(draft: Draft, folder: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write config.json and model.safetensors to `folder`; returns the bytes of both.

    A confidence head that is there already goes: it was trained for another draft.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEAD_FILE).unlink(missing_ok=True)
    save_file(exported_state(draft, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    config = draft_config(draft.shape, draft.draft_tokens.numel(), dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum((folder / name).stat().st_size for name in ("config.json", "model.safetensors"))
