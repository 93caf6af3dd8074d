"""The block draft: a native DSpark checkpoint (arXiv 2607.05147), which drafts all its positions in one forward.

As in SGLang's Qwen3DSparkModel: keys and values of the context are made of the target's residual streams; the block is
the anchor's embedding and gamma - 1 mask embeddings that see the context and one another; its logits go through the
target's head and get, token by token, a bias from the token drafted before; the confidence of a position is a linear
map of its hidden state and that token's Markov embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tiny.fit import descend, optimizer_and_scheduler
from tests.tiny.model import MLP, Attention, Llama, RMSNorm, Seen, Shape, linear, rotate

MASK = 1  # any token id: it is only ever embedded, so an ordinary token that texts hardly use will do


class DSpark(nn.Module):
    """One layer, a vanilla Markov head and a confidence head; parameters carry the checkpoint's names."""

    def __init__(self, shape: Shape, gamma: int, rank: int = 16) -> None:
        super().__init__()
        self.gamma, self.rank = gamma, rank
        self.fc = linear(3 * shape.hidden, shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden)
        layer = nn.Module()
        layer.input_layernorm = RMSNorm(shape.hidden)
        layer.self_attn = Attention(shape)
        layer.self_attn.q_norm = RMSNorm(layer.self_attn.size)
        layer.self_attn.k_norm = RMSNorm(layer.self_attn.size)
        layer.post_attention_layernorm = RMSNorm(shape.hidden)
        layer.mlp = MLP(shape)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(shape.hidden)
        self.markov_head = nn.Module()
        self.markov_head.markov_w1 = nn.Embedding(shape.vocab, rank)
        self.markov_head.markov_w2 = linear(rank, shape.vocab)
        self.confidence_head = nn.Module()
        self.confidence_head.proj = linear(shape.hidden + rank, 1, bias=True)

    def hidden(self, target: Llama, tokens: Tensor, seen: Seen, anchors: Tensor) -> Tensor:
        """Blocks that start at positions ``anchors`` [A] of tokens [B, T]: hidden states [B, A, gamma, hidden].

        A block sees the target's streams of the positions before its anchor only.
        """
        layer, length = self.layers[0], tokens.shape[1]
        attention = layer.self_attn
        embeds = target.model.embed_tokens(tokens[:, anchors])[:, :, None]
        masks = target.model.embed_tokens(torch.tensor(MASK)).expand(*embeds.shape[:2], self.gamma - 1, -1)
        x = torch.cat((embeds, masks), 2)
        read = layer.input_layernorm(x)
        offsets = torch.arange(self.gamma)
        positions = (anchors[:, None] + offsets).flatten()
        q, k, v = self._project(attention, read.flatten(1, 2), positions)
        context = self.hidden_norm(self.fc(seen.aux))
        _, context_k, context_v = self._project(attention, context, torch.arange(length))
        blocks = (len(tokens), -1, len(anchors), self.gamma, attention.size)
        q, k, v = q.view(blocks), k.view(blocks), v.view(blocks)
        on_context = torch.einsum("bhagd,bhtd->bhagt", q, context_k)
        unseen = torch.arange(length) >= anchors[:, None, None]
        scores = (on_context.masked_fill(unseen, float("-inf")), torch.einsum("bhagd,bhacd->bhagc", q, k))
        weights = (torch.cat(scores, -1) * attention.size**-0.5).softmax(-1)
        far, near = weights.split((length, self.gamma), -1)
        y = torch.einsum("bhagt,bhtd->bhagd", far, context_v) + torch.einsum("bhagc,bhacd->bhagd", near, v)
        x = x + attention.o_proj(y.permute(0, 2, 3, 1, 4).flatten(3))
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))

    def _project(self, attention: Attention, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention.project with the normed queries and keys of a Qwen3 layer."""
        batch, length, _ = x.shape
        q = attention.q_norm(attention.q_proj(x).view(batch, length, attention.heads, attention.size))
        k = attention.k_norm(attention.k_proj(x).view(batch, length, attention.kv_heads, attention.size))
        v = attention.v_proj(x).view(batch, length, attention.kv_heads, attention.size)
        repeat = attention.heads // attention.kv_heads
        k, v = (t.transpose(1, 2).repeat_interleave(repeat, 1) for t in (rotate_rows(k, positions), v))
        return rotate_rows(q, positions).transpose(1, 2), k, v

    def step(self, target: Llama, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., vocab] and confidence logit [...] of positions with these states and tokens before them."""
        latent = self.markov_head.markov_w1(previous)
        confidence = self.confidence_head.proj(torch.cat((hidden, latent), -1)).squeeze(-1)
        return target.lm_head(hidden) + self.markov_head.markov_w2(latent), confidence


def rotate_rows(x: Tensor, positions: Tensor) -> Tensor:
    """rotate() for x[B, T, heads, D]."""
    return rotate(x.transpose(1, 2), positions).transpose(1, 2)


def fit_dspark(draft: DSpark, target: Llama, rows: Tensor, *, steps: int, batch: int, rate: float) -> float:
    """Teach the target's distribution after every token of rows[N, T], and the confidence what is accepted of a sampled
    draft, 1 - total variation. Returns the last loss, nats a token."""
    target.requires_grad_(False)
    optimizer, scheduler = optimizer_and_scheduler(draft, rate, steps)
    anchors = torch.arange(1, rows.shape[1] - draft.gamma)
    at = anchors[:, None] + torch.arange(draft.gamma)
    loss = torch.zeros(())
    for step in range(steps):
        tokens = rows[torch.arange(step * batch, (step + 1) * batch) % rows.shape[0]]
        with torch.no_grad():
            seen: Seen = target(tokens)
            wanted = seen.logits.softmax(-1)[:, at]
        logits, confidence = draft.step(target, draft.hidden(target, tokens, seen, anchors), tokens[:, at])
        loss = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
        overlap = torch.minimum(wanted, logits.detach().softmax(-1)).sum(-1)
        descend(draft, loss + F.binary_cross_entropy_with_logits(confidence, overlap), optimizer, scheduler)
    target.requires_grad_(True)
    return loss.item()


@torch.no_grad()
def draft_blocks(draft: DSpark, target: Llama, texts: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy blocks from positions ``anchors`` [A] of texts [B, T]: tokens and confidence, [B, A, gamma] each."""
    hidden = draft.hidden(target, texts, target(texts), anchors)
    previous, tokens, confidence = texts[:, anchors], [], []
    for position in range(draft.gamma):
        logits, chance = draft.step(target, hidden[:, :, position], previous)
        previous = logits.argmax(-1)
        tokens.append(previous)
        confidence.append(chance.sigmoid())
    return torch.stack(tokens, -1), torch.stack(confidence, -1)
