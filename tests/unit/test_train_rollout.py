"""The draft's rollout is what serving does, pair by pair: alignment, attention of chains, acceptance."""

import pytest
import torch
import torch.nn.functional as F

from sglang_dspark.train.batches import collate, epoch
from sglang_dspark.train.evaluate import agreeing_run, evaluate, verify_steps
from sglang_dspark.train.fit import Fitting, Objective
from sglang_dspark.train.generate import Generation
from sglang_dspark.train.model import Chains, Draft, Pairs, draft_from_target
from sglang_dspark.train.store import Sample
from sglang_dspark.train.target import Target
from tests.train_tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, answers, write_target

SAYABLE = torch.arange(1, VOCAB - 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def samples(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    options = Generation(max_new_tokens=14, answers=((0.0, 1.0),))
    return answers(target, tmp_path_factory.mktemp("again"), options)


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    return draft_from_target(target, SAYABLE, torch.tensor([1.0, 0.5, 0.25]), seed=3).eval()


def serve(draft: Draft, sample: Sample, start: int, depth: int) -> list[torch.Tensor]:
    """Logits of a chain from pair `start`, one whole forward over a growing list of pairs for each draft token, as
    SGLang's draft worker computes them: pair i holds hidden state i and token i + 1, at rotary position i."""
    layer, attn = draft.midlayer, draft.midlayer.self_attn
    streams = [draft.fc(sample.aux[i].float() * draft.aux_scale.repeat_interleave(HIDDEN)) for i in range(start + 1)]
    logits = []
    for step in range(depth):
        stream = torch.stack(streams)
        tokens = sample.tokens[1 : start + 2 + step].long()
        x = torch.cat([layer.input_layernorm(draft.embed[tokens]), layer.hidden_norm(stream)], dim=-1)
        length = x.shape[0]
        half = torch.arange(HEAD_DIM // 2)
        angle = torch.arange(length)[:, None] * 10000.0 ** (-2 * half / HEAD_DIM)

        def turn(y: torch.Tensor, angle: torch.Tensor = angle) -> torch.Tensor:
            a, b = y.chunk(2, dim=-1)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        q = turn(attn.q_proj(x).view(length, HEADS, HEAD_DIM))
        k = turn(attn.k_proj(x).view(length, KV_HEADS, HEAD_DIM)).repeat_interleave(HEADS // KV_HEADS, 1)
        v = attn.v_proj(x).view(length, KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, 1)
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        ).transpose(0, 1)
        h = stream + attn.o_proj(mixed.reshape(length, -1))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
        logits.append(draft.lm_head(draft.norm(h))[-1])
        streams.append(h[-1])
    return logits


@torch.no_grad()
def test_rollout_equals_a_draft_served_pair_by_pair(draft: Draft, samples: list[Sample]) -> None:
    batch = collate(samples)
    chains = draft.begin(batch.pairs, batch.row, batch.start)
    checked = 0
    for step in range(4):
        for c in range(0, chains.row.numel(), 7):
            expected = serve(draft, samples[int(chains.row[c])], int(chains.start[c]), step + 1)[-1]
            torch.testing.assert_close(chains.logits[c], expected, rtol=1e-4, atol=1e-4)
            checked += 1
        following = chains.start + step + 1
        inside = following < batch.text.shape[1]
        keep = inside & (batch.text[chains.row, following.clamp(max=batch.text.shape[1] - 1)] >= 0)
        keep &= torch.arange(keep.numel()) % 3 != step % 3  # ended chains leave gaps
        chains = draft.advance(chains, keep)
    assert checked > 20


def test_each_chain_is_taught_the_token_after_its_pair(target: Target, samples: list[Sample]) -> None:
    batch = collate(samples, prompt_share=0)
    for row, sample in enumerate(samples):
        mine = batch.row == row
        starts = batch.start[mine]
        assert int(starts[0]) == sample.prompt_tokens - 1
        for start, final in zip(starts.tolist(), batch.final[mine], strict=True):
            following = int(sample.tokens[start + 2])
            assert int(batch.pairs.tokens[row, start]) == int(sample.tokens[start + 1])
            assert int(batch.text[row, start]) == following
            assert int(target.logits(final).argmax()) == following  # the answers are greedy


def test_a_thinned_batch_keeps_all_answers_and_its_chains_their_own_targets(
    target: Target, samples: list[Sample]
) -> None:
    whole, thin = collate(samples), collate(samples, prompt_share=0.4, seed=1)
    assert torch.equal(thin.final, whole.final)
    kept = set(zip(thin.row.tolist(), thin.start.tolist(), strict=True))
    every = set(zip(whole.row.tolist(), whole.start.tolist(), strict=True))
    answers = {(row, start) for row, start in every if start >= samples[row].prompt_tokens - 1}
    assert answers < kept < every
    for row, start, at in zip(thin.row.tolist(), thin.start.tolist(), thin.at.tolist(), strict=True):
        assert torch.equal(thin.final[at], samples[row].final[start - samples[row].first].float())
    other = collate(samples, prompt_share=0.4, seed=2)
    assert thin.at.tolist() == collate(samples, prompt_share=0.4, seed=1).at.tolist() != other.at.tolist()


def test_training_also_starts_inside_the_prompt_but_marks_it(samples: list[Sample]) -> None:
    everything, answers = collate(samples), collate(samples, prompt_share=0)
    assert everything.row.numel() > answers.row.numel()
    assert int(everything.answer.sum()) == answers.row.numel() and bool(answers.answer.all())


@torch.no_grad()
def test_agreeing_run_equals_a_served_chain(draft: Draft, samples: list[Sample]) -> None:
    batch = collate(samples, prompt_share=0)
    runs = agreeing_run(draft, batch, depth=3)
    for row, start in zip(batch.row[::3].tolist(), batch.start[::3].tolist(), strict=True):
        sample = samples[row]
        room = min(3, sample.tokens.numel() - 2 - start)
        agreed = 0
        for step, logits in enumerate(serve(draft, sample, start, room)):
            if int(draft.draft_tokens[logits.argmax()]) != int(sample.tokens[start + 2 + step]):
                break
            agreed += 1
        assert int(runs[row, start]) == agreed


def test_a_verify_step_moves_on_by_what_it_produced() -> None:
    assert verify_steps([2, 9, 9, 0, 1, 9, 9, 9], depth=2) == [2, 0, 1, 2]
    assert verify_steps([3, 0], depth=3) == []  # a window over the text's end says nothing


def test_a_draft_that_copies_the_target_is_always_accepted(
    samples: list[Sample], draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    perfect = Draft(draft.shape, draft.embed, torch.arange(VOCAB), draft.aux_scale)
    text = collate(sorted(samples, key=lambda s: s.prompt_tokens), prompt_share=0).text
    none = torch.empty(0)

    def oracle(pairs: Pairs, row: torch.Tensor, start: torch.Tensor, step: int = 0) -> Chains:
        logits = F.one_hot(text[row, start + step].clamp(min=0), VOCAB).float()
        return Chains(pairs, none, none, row, start, [(none, none)] * step, none, logits)

    monkeypatch.setattr(perfect, "begin", oracle)
    monkeypatch.setattr(perfect, "advance", lambda c, keep: oracle(c.pairs, c.row[keep], c.start[keep], len(c.own) + 1))
    report = evaluate(perfect, samples, depths=(1, 3))["greedy"]
    assert report["num_steps 3"]["all"]["accepted_length"] == 4.0
    assert report["num_steps 1"]["math"]["acceptance"] == [1.0]


def test_fitting_teaches_the_draft_its_text(target: Target, samples: list[Sample]) -> None:
    draft = draft_from_target(target, SAYABLE, torch.ones(3), seed=0)
    objective, batch = Objective(target, SAYABLE, Fitting(steps=3)), collate(samples)
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    with torch.no_grad():
        draft.lm_head.weight.copy_(torch.randn(draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)))
        _, before = objective(draft, batch)
    for _ in range(60):
        optimizer.zero_grad()
        loss, _ = objective(draft, batch)
        loss.backward()
        optimizer.step()
    _, after = objective(draft, batch)
    assert before[0] < 0.3
    assert bool((after > 0.8).all())


def test_an_epoch_shows_every_sample_once_in_a_seeded_order(samples: list[Sample]) -> None:
    many = samples * 5
    order = [[id(s) for s in part] for part in epoch(many, 3, seed=1)]
    assert sorted(i for part in order for i in part) == sorted(id(s) for s in many)
    assert order == [[id(s) for s in part] for part in epoch(many, 3, seed=1)]
    assert order != [[id(s) for s in part] for part in epoch(many, 3, seed=2)]
