"""A small Llama in plain torch whose parameters carry Hugging Face's names."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; the head size is hidden / heads."""

    vocab: int
    hidden: int = 128
    intermediate: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A linear layer drawn with variance 1 / inputs: these nets see some hundred steps, so they must start well."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding, half-split layout. x[B, heads, T, D], positions[T]."""
    half = x.shape[-1] // 2
    inverse = ROPE_THETA ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None].float() * inverse
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Grouped-query attention; `inputs` may be wider than the hidden size (EAGLE3 concatenates two streams)."""

    def __init__(self, shape: Shape, inputs: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.hidden // shape.heads
        inputs = inputs or shape.hidden
        self.q_proj = linear(inputs, shape.heads * self.size, bias)
        self.k_proj = linear(inputs, shape.kv_heads * self.size, bias)
        self.v_proj = linear(inputs, shape.kv_heads * self.size, bias)
        self.o_proj = linear(shape.heads * self.size, shape.hidden)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys and values, each [B, heads, T, D] with the keys repeated to all heads."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        repeat = self.heads // self.kv_heads
        k = rotate(k, positions).repeat_interleave(repeat, 1)
        return rotate(q, positions), k, v.repeat_interleave(repeat, 1)

    def merge(self, y: Tensor) -> Tensor:
        """[B, heads, T, D] to the hidden size."""
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.intermediate)
        self.up_proj = linear(shape.hidden, shape.intermediate)
        self.down_proj = linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, positions: Tensor, cache: list[Tensor]) -> Tensor:
        """x[B, T, hidden]; `cache` is [] for none kept, or [keys, values] of earlier positions, extended in place."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), positions)
        if cache:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = [k, v]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])
        x = x + self.self_attn.merge(y)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The stack without the head; `streams` are its residual streams."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)


@dataclass
class Seen:
    """What a target shows of tokens[B, T]: logits[B, T, vocab]; final[B, T, hidden], the normed state that the head
    reads (EAGLE, MTP); aux[B, T, 3 * hidden], the streams that leave layers 0, 1 and 2 (EAGLE3)."""

    logits: Tensor
    final: Tensor
    aux: Tensor


class Llama(nn.Module):
    """LlamaForCausalLM, untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = linear(shape.hidden, shape.vocab)

    def forward(self, tokens: Tensor, start: int = 0, caches: list[list[Tensor]] | None = None) -> Seen:
        """tokens[B, T] at positions start.. ; `caches` holds one list a layer, empty at first, when decoding."""
        positions = torch.arange(start, start + tokens.shape[1])
        x = self.model.embed_tokens(tokens)
        streams = []
        for index, layer in enumerate(self.model.layers):
            x = layer(x, positions, caches[index] if caches else [])
            streams.append(x)
        final = self.model.norm(x)
        return Seen(self.lm_head(final), final, torch.cat(streams[:3], -1))


@torch.no_grad()
def generate(target: Llama, prompts: Tensor, count: int, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """Continue prompts[B, P] by `count` tokens, row r at temperature[r] (0 = greedy). Returns [B, P + count]."""
    tokens, (batch, length) = prompts, prompts.shape
    size = target.shape.hidden // target.shape.heads
    empty = torch.empty(batch, target.shape.heads, 0, size)
    caches = [[empty, empty] for _ in range(target.shape.layers)]
    logits = target(prompts, 0, caches).logits[:, -1]
    for step in range(count):
        noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator).clamp_min(1e-20)))
        chosen = (logits + temperature[:, None] * noise).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, chosen), 1)
        if step + 1 < count:
            logits = target(chosen, length + step, caches).logits[:, -1]
    return tokens
