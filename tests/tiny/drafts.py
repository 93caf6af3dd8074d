"""The three chain drafts (EAGLE3, EAGLE, MTP) and the rollout of a chain from every position of a text at once.

Convention of SGLang's EAGLE worker: at position i the draft reads token i + 1 and the target's state of position i, and
predicts token i + 2. The next step of that chain stands at position i + 1, reads the token just predicted and the
draft's own state; its attention sees the target-fed keys up to i and the chain's own keys, never target-fed ones
beyond i. A draft of one layer therefore needs the target's embedding, its own layer, and a head.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tiny.model import MLP, Attention, Llama, RMSNorm, Seen, Shape, linear


class Eagle3(nn.Module):
    """LlamaForCausalLMEagle3: reads three residual streams of the target; own head, own final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = linear(3 * shape.hidden, shape.hidden)
        self.midlayer = nn.Module()
        self.midlayer.input_layernorm = RMSNorm(shape.hidden)
        self.midlayer.hidden_norm = RMSNorm(shape.hidden)
        self.midlayer.self_attn = Attention(shape, 2 * shape.hidden)
        self.midlayer.post_attention_layernorm = RMSNorm(shape.hidden)
        self.midlayer.mlp = MLP(shape)
        self.norm = RMSNorm(shape.hidden)
        self.lm_head = linear(shape.hidden, shape.vocab)

    @property
    def layer(self) -> nn.Module:
        return self.midlayer

    def first_state(self, seen: Seen) -> Tensor:
        return self.fc(seen.aux)

    def enter(self, embeds: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The residual and what attention reads."""
        both = (self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(state))
        return state, torch.cat(both, -1)

    def leave(self, x: Tensor, target: Llama) -> tuple[Tensor, Tensor]:
        """The state handed to the next step, and the logits."""
        return x, self.lm_head(self.norm(x))


class Eagle(nn.Module):
    """LlamaForCausalLMEagle: no norm before attention, none at the end; the target's head reads its state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = linear(2 * shape.hidden, shape.hidden, bias=True)
        self.layers = nn.ModuleList([nn.Module()])
        self.layer.self_attn = Attention(shape)
        self.layer.post_attention_layernorm = RMSNorm(shape.hidden)
        self.layer.mlp = MLP(shape)

    @property
    def layer(self) -> nn.Module:
        return self.layers[0]

    def first_state(self, seen: Seen) -> Tensor:
        return seen.final

    def enter(self, embeds: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((embeds, state), -1))
        return x, x

    def leave(self, x: Tensor, target: Llama) -> tuple[Tensor, Tensor]:
        return x, target.lm_head(x)


class Mtp(nn.Module):
    """MiMoMTP: a Qwen2 layer (biased q, k, v) between norms; blind to the token at position 0; the target's head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_layernorm = RMSNorm(shape.hidden)
        self.hidden_layernorm = RMSNorm(shape.hidden)
        self.input_proj = linear(2 * shape.hidden, shape.hidden)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.self_attn = Attention(shape, bias=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = MLP(shape)
        self.final_layernorm = RMSNorm(shape.hidden)

    @property
    def layer(self) -> nn.Module:
        return self

    def first_state(self, seen: Seen) -> Tensor:
        return seen.final

    def enter(self, embeds: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embeds = embeds * (positions != 0)[:, None]
        x = self.input_proj(torch.cat((self.hidden_layernorm(state), self.token_layernorm(embeds)), -1))
        return x, self.input_layernorm(x)

    def leave(self, x: Tensor, target: Llama) -> tuple[Tensor, Tensor]:
        state = self.final_layernorm(x)
        return state, target.lm_head(state)


def rollout(
    draft: Eagle3 | Eagle | Mtp, target: Llama, tokens: Tensor, seen: Seen, steps: int, own: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chains of `steps` tokens from every position of tokens[B, T]; yields (logits, state) of each step in turn.

    logits[B, T - 1, vocab] of step s at index i are for token i + s + 1, with s counted from 1. `own` maps draft ids to
    token ids, int64 [draft vocab]: with it chains read their own argmax (drafting); without, the text (training).
    """
    length = tokens.shape[1] - 1
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    inputs, state = tokens[:, 1:], draft.first_state(seen)[:, :-1]
    main_k = main_v = torch.empty(0)
    chain_k: list[Tensor] = []
    chain_v: list[Tensor] = []
    for step in range(1, steps + 1):
        positions = torch.arange(length) + step - 1
        x, read = draft.enter(target.model.embed_tokens(inputs), state, positions)
        attention = draft.layer.self_attn
        q, k, v = attention.project(read, positions)
        if step == 1:
            main_k, main_v = k, v
        else:
            chain_k.append(k)
            chain_v.append(v)
        scores = (q @ main_k.transpose(-1, -2)).masked_fill(~causal, float("-inf"))
        links = [(q * key).sum(-1, keepdim=True) for key in chain_k]
        weights = (torch.cat([scores, *links], -1) * attention.size**-0.5).softmax(-1)
        on_main, *on_chain = weights.split([length] + [1] * len(chain_v), -1)
        y = on_main @ main_v
        for weight, value in zip(on_chain, chain_v, strict=True):
            y = y + weight * value
        x = x + attention.merge(y)
        x = x + draft.layer.mlp(draft.layer.post_attention_layernorm(x))
        state, logits = draft.leave(x, target)
        yield logits, state
        # Training chains that run past the text read pad there; the caller does not look at those steps.
        inputs = F.pad(tokens[:, 1 + step :], (0, step)) if own is None else own[logits.argmax(-1)]
