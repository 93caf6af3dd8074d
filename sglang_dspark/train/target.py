"""A Llama target in plain float32 torch: batched prefill and decode that also return the hidden states a draft reads.

Written for throughput on a few CPU threads: no autograd, fused projections, one preallocated KV cache, rows of any
length side by side (padding on the right). Hidden-state indices are those of transformers' `hidden_states` and of
SGLang's `layers_to_capture`: index i is the residual stream entering layer i.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sglang_dspark.train.config import other_options, read_config, scaled_rope

# What config.json can ask of a Llama beyond its sizes, and the one value that is computed here.
PLAIN = {
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1,
    "rope_is_neox_style": True,
    "quantization_config": None,
}
# Sizes without a default.
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "eos_token_id",
)
# Weights of a layer, by name.
LAYER_WEIGHTS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model, as config.json gives them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    theta: float
    max_positions: int
    bos: int | None
    eos: tuple[int, ...]  # any of them ends an answer

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """From `folder/config.json`.

        Raises:
            ValueError: the model is not a plain Llama, or a size is missing.
            OSError: of the system, where there is no config.json.
        """
        config = read_config(folder)
        other = other_options(config, PLAIN) + scaled_rope(config)
        if config.get("model_type") != "llama":
            other.append(f"model_type {config.get('model_type')!r}")
        if other:
            raise ValueError(
                f"{folder}: its config.json has {', '.join(other)}, and the trainer reads Llama models without biases, "
                "rope scaling and quantisation only; name another model"
            )
        lacking = [name for name in NEEDED if config.get(name) in (None, [])]
        if lacking:
            raise ValueError(f"{folder}: its config.json lacks {', '.join(lacking)}; fetch the model again")
        rope = config.get("rope_parameters") or {}
        heads, eos = config["num_attention_heads"], config["eos_token_id"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            max_positions=config["max_position_embeddings"],
            bos=config.get("bos_token_id"),
            eos=tuple(eos) if isinstance(eos, list) else (eos,),
        )

    @property
    def default_aux_layers(self) -> tuple[int, int, int]:
        """The hidden states SGLang captures for EAGLE3 when a draft does not say which."""
        return (2, self.layers // 2, self.layers - 3)

    def captured(self, layers: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The hidden states to capture, None for the default; ValueError when the model has no such layers."""
        layers = layers or self.default_aux_layers
        if len(set(layers)) < len(layers) or min(layers) < 0 or max(layers) >= self.layers:
            raise ValueError(f"cannot capture hidden states {layers} of {self.layers} layers; name a deeper model")
        return layers


def rope_table(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [positions, head_dim] float32, the two halves of the last axis alike."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse).float()
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [..., head_dim]; rotary pairs lie half a head apart."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class Cache:
    """Keys and values of a batch: [layers, rows, kv_heads, capacity, head_dim] float32 each."""

    def __init__(self, shape: Shape, rows: int, capacity: int) -> None:
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_dim)
        # Zeros, not empty: a masked position still multiplies its value by a probability of 0, and NaN * 0 is NaN.
        self.k = list(torch.zeros(size).unbind(0))
        self.v = list(torch.zeros(size).unbind(0))

    def take(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows, in the given order."""
        for layer in range(len(self.k)):
            self.k[layer] = self.k[layer][rows]
            self.v[layer] = self.v[layer][rows]


class Target:
    """The target's weights and its two forward passes."""

    def __init__(self, folder: Path, aux_layers: tuple[int, ...] | None = None) -> None:
        self.shape = Shape.read(folder)
        self.aux_layers = self.shape.captured(aux_layers)
        state: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            state.update({name: weight.float() for name, weight in load_file(file).items()})
        self.state = state
        self.embed = state["model.embed_tokens.weight"]
        self.norm = state["model.norm.weight"]
        self.head = state.get("lm_head.weight", self.embed)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(self.shape.layers)]
        self.cos, self.sin = rope_table(self.shape.max_positions, self.shape.head_dim, self.shape.theta)

    def _layer(self, prefix: str) -> dict[str, Tensor]:
        def get(name: str) -> Tensor:
            return self.state[f"{prefix}{name}.weight"]

        return {
            "in_norm": get("input_layernorm"),
            "qkv": torch.cat([get(f"self_attn.{part}_proj") for part in "qkv"]),
            "o": get("self_attn.o_proj"),
            "post_norm": get("post_attention_layernorm"),
            "gate_up": torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
            "down": get("mlp.down_proj"),
        }

    def _run(self, tokens: Tensor, positions: Tensor, attend: Any) -> tuple[Tensor, Tensor]:
        """The layers over tokens [rows, length]; `attend(layer, q, k, v)` owns the cache and the mask."""
        s = self.shape
        rows, length = tokens.shape
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        x = self.embed[tokens]
        captured = []
        for index, w in enumerate(self.layers):
            if index in self.aux_layers:
                captured.append(x)
            qkv = F.linear(F.rms_norm(x, (s.hidden,), w["in_norm"], s.eps), w["qkv"])
            qkv = qkv.view(rows, length, s.heads + 2 * s.kv_heads, s.head_dim)
            q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], dim=2)
            mixed = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + F.linear(mixed.reshape(rows, length, -1), w["o"])
            gate, up = F.linear(F.rms_norm(x, (s.hidden,), w["post_norm"], s.eps), w["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), w["down"])
        return torch.cat(captured, dim=-1), F.rms_norm(x, (s.hidden,), self.norm, s.eps)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, cache: Cache, first_row: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens [rows, length], padded on the right with anything, into `cache` from `first_row` on.

        Returns the captured hidden states [rows, length, len(aux_layers) * hidden] and the last layer's, after the
        final norm, [rows, length, hidden]. What lies at padding is meaningless.
        """
        rows, length = tokens.shape
        groups = self.shape.heads // self.shape.kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            cache.k[layer][first_row : first_row + rows, :, :length] = k
            cache.v[layer][first_row : first_row + rows, :, :length] = v
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return self._run(tokens, torch.arange(length).expand(rows, length), attend)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, lengths: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """One token a row, [rows], at positions `lengths` [rows]. Returns as `prefill`, without the length axis."""
        s = self.shape
        rows = tokens.shape[0]
        row = torch.arange(rows)
        top = int(lengths.max()) + 1
        unwritten = torch.arange(top) > lengths[:, None]
        mask = torch.zeros(rows, 1, 1, top).masked_fill_(unwritten[:, None, None], -torch.inf)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.k[layer][row, :, lengths] = k[:, 0]
            cache.v[layer][row, :, lengths] = v[:, 0]
            # The query heads that share a key head stand where query positions usually do.
            grouped = q.reshape(rows, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
            keys, values = cache.k[layer][:, :, :top], cache.v[layer][:, :, :top]
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)

        aux, final = self._run(tokens[:, None], lengths[:, None], attend)
        return aux[:, 0], final[:, 0]

    @torch.inference_mode()
    def logits(self, final: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states after the final norm [..., hidden]."""
        return F.linear(final, self.head)
