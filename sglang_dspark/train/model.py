"""The EAGLE3 draft: one Llama layer over the target's captured hidden states, as SGLang 0.5.23 runs it.

Names and arithmetic follow `sglang/srt/models/llama_eagle3.py`: the residual stream starts as `fc(aux)` (from the
second draft step on it is the stream of the step before, *before* the final norm), attention reads the normed embedding
of the next token beside the normed stream, and the head covers `draft_vocab_size` tokens. Pair i is the target's hidden
state of token i with token i + 1; it predicts token i + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.train.target import Shape, Target, rope_table, rotate


@dataclass(frozen=True)
class Pairs:
    """Answers side by side, each a run of pairs somewhere in its row.

    aux [rows, columns, aux width], the target's states unscaled; tokens int64 [rows, columns], token i + 1 of pair i;
    real bool [rows, columns], False in padding.
    """

    aux: Tensor
    tokens: Tensor
    real: Tensor


@dataclass(frozen=True)
class Chains:
    """Drafts under way: chain c started at column `start[c]` of row `row[c]` and has made `len(own) + 1` draft tokens.

    keys, values [rows, columns, kv_heads, head_dim] of the true pairs; own, those of each chain's own pairs, a [chains,
    kv_heads, head_dim] couple per advance; stream [chains, hidden]; logits [chains, draft vocab] of the newest draft.
    """

    pairs: Pairs
    keys: Tensor
    values: Tensor
    row: Tensor
    start: Tensor
    own: list[tuple[Tensor, Tensor]]
    stream: Tensor
    logits: Tensor


class Attention(nn.Module):
    """The layer's projections; the embedding and the stream enter side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide = shape.heads * shape.head_dim
        narrow = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)


class Draft(nn.Module):
    """The draft's own weights, under their names in the exported file, and the target's frozen embedding."""

    embed: Tensor
    aux_scale: Tensor
    draft_tokens: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, embed: Tensor, draft_tokens: Tensor, aux_scale: Tensor) -> None:
        """`draft_tokens` int64 [draft vocab], ascending target ids; `aux_scale` float32 [captured layers]."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.hidden * aux_scale.numel(), shape.hidden, bias=False)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.lm_head = nn.Linear(shape.hidden, draft_tokens.numel(), bias=False)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("aux_scale", aux_scale)
        self.register_buffer("draft_tokens", draft_tokens)
        cos, sin = rope_table(shape.max_positions, shape.head_dim, shape.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def start(self, aux: Tensor) -> Tensor:
        """The residual stream [..., hidden] of captured hidden states [..., aux width], as the target gives them."""
        return self.fc(aux * self.aux_scale.repeat_interleave(self.shape.hidden))

    def inputs(self, stream: Tensor, tokens: Tensor) -> Tensor:
        """What attention projects: [normed embedding, normed stream], [..., 2 * hidden]."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(self.embed[tokens]), layer.hidden_norm(stream)], dim=-1)

    def queries(self, inputs: Tensor, columns: Tensor) -> Tensor:
        """Scaled queries [..., heads, head_dim], rotated for `columns` [...]."""
        s = self.shape
        q = self.midlayer.self_attn.q_proj(inputs).unflatten(-1, (s.heads, s.head_dim))
        return rotate(q, self.cos[columns, None], self.sin[columns, None]) * s.head_dim**-0.5

    def keys_values(self, inputs: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., kv_heads, head_dim], the keys rotated for `columns` [...]."""
        s, attn = self.shape, self.midlayer.self_attn
        k = attn.k_proj(inputs).unflatten(-1, (s.kv_heads, s.head_dim))
        v = attn.v_proj(inputs).unflatten(-1, (s.kv_heads, s.head_dim))
        return rotate(k, self.cos[columns, None], self.sin[columns, None]), v

    def finish(self, stream: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The rest of the layer: the new stream (pre-norm) and the draft's logits."""
        layer = self.midlayer
        stream = stream + layer.self_attn.o_proj(mixed)
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        return stream, self.lm_head(self.norm(stream))

    def begin(self, pairs: Pairs, row: Tensor, start: Tensor) -> Chains:
        """The first draft step of chains that start at columns `start` [chains] of rows `row` [chains]."""
        streams = self.start(pairs.aux)
        inputs = self.inputs(streams, pairs.tokens)
        columns = torch.arange(pairs.tokens.shape[1]).expand_as(pairs.tokens)
        keys, values = self.keys_values(inputs, columns)
        q = self.queries(inputs[row, start], start)
        mixed = self._attend(q, keys, values, pairs.real, row, start, [])
        stream, logits = self.finish(streams[row, start], mixed)
        return Chains(pairs, keys, values, row, start, [], stream, logits)

    def advance(self, chains: Chains, keep: Tensor) -> Chains:
        """The next draft step of the chains where `keep` [chains]: each is fed the text's own next token.

        A chain that matters has drafted exactly that token: what comes after a rejection is never used.
        """
        row, start = chains.row[keep], chains.start[keep]
        stream = chains.stream[keep]
        column = start + len(chains.own) + 1
        inputs = self.inputs(stream, chains.pairs.tokens[row, column])
        own = [*((key[keep], value[keep]) for key, value in chains.own), self.keys_values(inputs, column)]
        mixed = self._attend(
            self.queries(inputs, column), chains.keys, chains.values, chains.pairs.real, row, start, own
        )
        stream, logits = self.finish(stream, mixed)
        return Chains(chains.pairs, chains.keys, chains.values, row, start, own, stream, logits)

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        real: Tensor,
        row: Tensor,
        start: Tensor,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Attention of each chain's newest pair over the true pairs up to its start, and its own pairs after that.

        As in serving, where the draft's cache is rewritten from the target's states after each verify. Chains come
        row by row; they are padded to [rows, most chains of a row] for the products with the true pairs.
        q [chains, heads, head_dim]; keys, values [rows, columns, kv_heads, head_dim]; returns [chains, hidden].
        """
        s = self.shape
        groups = s.heads // s.kv_heads
        rows, length = real.shape
        counts = torch.bincount(row, minlength=rows)
        slot = torch.arange(row.numel()) - (counts.cumsum(0) - counts)[row]
        widest = int(counts.max())
        padded = q.new_zeros(rows, widest, s.heads, s.head_dim).index_put((row, slot), q)
        padded = padded.unflatten(2, (s.kv_heads, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        scores = padded @ keys.permute(0, 2, 3, 1)  # [rows, kv_heads, widest * groups, columns]
        scores = scores.unflatten(2, (widest, groups)).permute(0, 2, 1, 3, 4)[row, slot]
        hidden = (torch.arange(length) > start[:, None]) | ~real[row]
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        grouped = q.unflatten(1, (s.kv_heads, groups))
        after = [(grouped * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.softmax(torch.cat([scores, *after], dim=-1), dim=-1)
        spread = q.new_zeros(rows, widest, s.kv_heads, groups, length).index_put((row, slot), weights[..., :length])
        mixed = spread.permute(0, 2, 1, 3, 4).flatten(2, 3) @ values.transpose(1, 2)
        mixed = mixed.unflatten(2, (widest, groups)).permute(0, 2, 1, 3, 4)[row, slot]
        for step, (_, v) in enumerate(own):
            mixed = mixed + weights[..., length + step, None] * v[:, :, None]
        return mixed.flatten(1)


@torch.no_grad()
def draft_from_target(target: Target, draft_tokens: Tensor, aux_scale: Tensor, seed: int) -> Draft:
    """A draft that starts as the target's last layer on the deepest captured state, brought to unit scale.

    The head and the norms are the target's; what has no counterpart there (the embedding's half of q, k and v, the
    shallower captured states) starts small and random.
    """
    generator = torch.Generator().manual_seed(seed)
    draft = Draft(target.shape, target.embed, draft_tokens, aux_scale)
    hidden = target.shape.hidden
    for weight in (draft.fc.weight, *(getattr(draft.midlayer.self_attn, f"{part}_proj").weight for part in "qkv")):
        weight.normal_(0, 0.02, generator=generator)  # 0.02: Llama's own initial scale
    draft.fc.weight[:, -hidden:] += torch.eye(hidden)
    last = f"model.layers.{target.shape.layers - 1}."
    attn, mlp = draft.midlayer.self_attn, draft.midlayer.mlp
    for part in "qkv":
        getattr(attn, f"{part}_proj").weight[:, hidden:] = target.state[f"{last}self_attn.{part}_proj.weight"]
    # fc puts out the deepest state divided by its RMS; what the layer adds to it shrinks alike.
    attn.o_proj.weight.copy_(target.state[f"{last}self_attn.o_proj.weight"] * aux_scale[-1])
    mlp.gate_proj.weight.copy_(target.state[f"{last}mlp.gate_proj.weight"])
    mlp.up_proj.weight.copy_(target.state[f"{last}mlp.up_proj.weight"])
    mlp.down_proj.weight.copy_(target.state[f"{last}mlp.down_proj.weight"] * aux_scale[-1])
    draft.midlayer.hidden_norm.weight.copy_(target.state[f"{last}input_layernorm.weight"])
    draft.midlayer.post_attention_layernorm.weight.copy_(target.state[f"{last}post_attention_layernorm.weight"])
    draft.norm.weight.copy_(target.norm)
    draft.lm_head.weight.copy_(target.head[draft_tokens])
    return draft
