"""Training of the confidence head: what its examples are, that it finds what is there, and how it is judged."""

from pathlib import Path

import pytest
import torch

from sglang_dspark.confidence.features import FEATURES, draft_features
from sglang_dspark.confidence.head import HEAD_RULES, ConfidenceHead, head_inputs
from sglang_dspark.train.batches import collate
from sglang_dspark.train.examples import Examples, gather
from sglang_dspark.train.generate import Generation, answer, tokenise
from sglang_dspark.train.head import fit_head, judge
from sglang_dspark.train.model import Draft, draft_from_target
from sglang_dspark.train.store import Sample
from sglang_dspark.train.target import Target
from tests.train_tiny import PROMPTS, VOCAB, answers, write_target

SAYABLE = torch.arange(1, VOCAB - 2)
GREEDY, SAMPLED, DRAWN = range(3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def samples(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    options = Generation(max_new_tokens=20, answers=((0.0, 1.0), (1.0, 1.0)))
    return answers(target, tmp_path_factory.mktemp("again"), options)


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    """The target's own head on states near its last: right now and then."""
    return draft_from_target(target, SAYABLE, torch.tensor([1.0, 0.5, 0.25]), seed=3).eval()


def test_examples_hold_what_the_draft_showed_and_the_chance_of_acceptance(
    draft: Draft, target: Target, samples: list[Sample]
) -> None:
    seen = gather(draft, target, samples, depth=1)
    usable = sorted(samples, key=lambda s: s.prompt_tokens)
    batch = collate(usable, prompt_share=0)
    assert len(seen.token) == len(batch.row) and int(seen.position.max()) == 0
    with torch.no_grad():
        chains = draft.begin(batch.pairs, batch.row, batch.start)
    p, q = torch.softmax(target.logits(batch.final), -1), torch.softmax(chains.logits, -1)
    wide = torch.zeros_like(p)
    wide[:, draft.draft_tokens] = q
    drafted = draft.draft_tokens[q.argmax(-1)]
    rows = torch.arange(len(drafted))
    torch.testing.assert_close(seen.inputs, head_inputs(chains.stream, draft_features(chains.logits)))
    assert torch.equal(seen.token, batch.pairs.tokens[batch.row, batch.start])
    assert torch.equal(seen.truth[:, GREEDY], (p.argmax(-1) == drafted).float())
    torch.testing.assert_close(seen.truth[:, SAMPLED], p[rows, drafted])
    torch.testing.assert_close(seen.truth[:, DRAWN], 1 - 0.5 * (p - wide).abs().sum(-1), atol=1e-5, rtol=1e-4)


def test_later_positions_are_reached_as_their_rule_reaches_them(
    draft: Draft, target: Target, samples: list[Sample]
) -> None:
    seen = gather(draft, target, samples, depth=3)
    for chain in seen.chain.unique().tolist():
        mine = (seen.chain == chain).nonzero()[:, 0]
        assert seen.position[mine].tolist() == list(range(len(mine)))
        assert seen.weight[mine[0]].tolist() == [1.0, 1.0, 1.0]
        assert bool((seen.weight[mine].diff(dim=0) <= 1e-6).all())
    deep = seen.position > 0
    assert set(seen.weight[deep, SAMPLED].unique().tolist()) <= {0.0, 1.0}  # an argmax draft equals the text or not
    assert not bool((seen.of("greedy") & seen.warm).any()) and not bool((seen.of("drawn") & ~seen.warm).any())
    # On a greedy text, a right draft is the text's token and the next position is reached with certainty.
    for chain in seen.chain[seen.of("greedy") & deep].unique().tolist():
        assert bool((seen.truth[(seen.chain == chain) & (seen.position == 0), GREEDY] == 1).all())


def test_drawn_contexts_weigh_as_rejection_sampling_reaches_them(draft: Draft, target: Target, tmp_path: Path) -> None:
    """Texts sampled from the target: the mean weight at position 2 is the chance to accept position 1."""
    (prompt,) = tokenise(PROMPTS[:1], write_target(tmp_path), Generation(answers=((1.0, 1.0),)))
    samples = answer(target, [prompt] * 40, 3, 40, seed=5)
    seen = gather(draft, target, samples, depth=2)
    first, second = seen.position == 0, seen.position == 1
    ends = torch.tensor([s.tokens.numel() - 2 - (s.prompt_tokens - 1) for s in samples]).sum()
    assert int(first.sum()) == int(ends)
    # Every chain but each answer's last goes on; a weight below 1e-3 is dropped.
    reached = float(seen.weight[second, DRAWN].sum()) / (int(first.sum()) - len(samples))
    expected = float(seen.truth[first, DRAWN].mean())
    assert reached == pytest.approx(expected, abs=0.04)  # about four standard errors of 1,500 positions


def made_up(answers: int = 60, chains: int = 40) -> tuple[Examples, torch.Tensor, torch.Tensor]:
    """Examples whose acceptance is logistic in hidden state, token and features; returns them, embedding, logits."""
    generator = torch.Generator().manual_seed(0)
    n, hidden = answers * chains, 16
    inputs = torch.randn(n, hidden + len(FEATURES), generator=generator)
    embed = torch.randn(50, 5, generator=generator)
    token = torch.randint(50, (n,), generator=generator)
    weight = torch.randn(hidden + 5 + len(FEATURES), generator=generator)
    columns = torch.cat([inputs[:, :hidden], embed[token], inputs[:, hidden:]], 1)
    logits = columns @ weight * 0.4
    chance = torch.sigmoid(logits)
    hard = torch.bernoulli(chance, generator=generator)
    answer = torch.arange(n) // chains
    warm = answer % 2 == 1
    examples = Examples(
        inputs, token, torch.stack([hard, chance, chance], 1), torch.ones(n, 3), torch.zeros(n, dtype=torch.long),
        torch.arange(n), answer, warm, answer % 3, ("chat", "code", "math"),
    )  # fmt: skip
    return examples, embed, logits


def test_a_fitted_head_finds_the_chance_it_was_shown(tmp_path: Path) -> None:
    examples, embed, logits = made_up()
    head, chosen = fit_head(examples, embed, tmp_path)
    assert isinstance(head, ConfidenceHead) and set(chosen) == {*HEAD_RULES, "bytes"}
    said = head.of_inputs(examples.inputs, examples.token)
    for rule in range(3):
        assert float((torch.sigmoid(said[:, rule]) - torch.sigmoid(logits)).abs().mean()) < 0.08  # chance: 0.25
    report = judge(head, examples)
    assert set(report) == set(HEAD_RULES) and set(report["greedy"]) == {"all", "chat", "code", "math"}
    row = report["sampled"]["all"][0]
    assert row["examples"] == int(examples.warm.sum())
    assert row["head_auc"] > row["top_auc"] + 0.1 and row["head_ece"] < 0.06


def test_too_few_answers_are_refused(tmp_path: Path) -> None:
    examples, embed, _ = made_up(answers=2)
    with pytest.raises(ValueError, match="too few answers"):
        fit_head(examples, embed, tmp_path)
