"""Dialogues that the target writes itself: what the script fixes, what the target says, and its hidden states."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_dspark.train.batches import is_usable
from sglang_dspark.train.data import Prompt
from sglang_dspark.train.generate import Generation, shared_prefix, shared_suffix, tokenise
from sglang_dspark.train.store import load_samples
from sglang_dspark.train.target import Cache, Target
from sglang_dspark.train.variations import Dialogue, Variations, plan_dialogues, write_on, write_variations
from tests.train_tiny import PROMPTS, write_target

OPTIONS = Variations(batches=1, opening=(2, 4), max_turn_tokens=6, max_new_tokens=8, sampled_share=0.5)
MANY = [*PROMPTS, Prompt("write code", "mbpp"), Prompt("hello you there", "arena-hard")]
EOS, CLOSE = (2,), [2, 13, 1, 100]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def test_a_dialogue_opens_with_the_prompt_closes_its_turn_and_answers_to_the_limit() -> None:
    dialogue = Dialogue([7, 8], CLOSE, 0.0, "math", EOS)
    sampled = iter(range(50, 90))
    while not dialogue.ended(OPTIONS):
        dialogue.say(next(sampled), OPTIONS)
    turn = dialogue.text[2 : 2 + OPTIONS.max_turn_tokens]
    assert dialogue.text[:2] == [7, 8]
    assert turn == [52, 53, 54, 55, 56, 57]  # the samples at those steps
    assert dialogue.text[8:12] == CLOSE
    assert dialogue.answer_at == 12 and len(dialogue.text) == 12 + OPTIONS.max_new_tokens
    before = list(dialogue.text)
    dialogue.say(99, OPTIONS)
    assert dialogue.text == before


@pytest.mark.parametrize(("eos", "last"), (((2,), 2), ((2, 9), 2), ((9, 2), 2), ((2, 9), 9), ((9,), 9), ((9, 8, 7), 8)))
def test_the_target_may_end_its_turn_and_its_answer_itself(eos: tuple[int, ...], last: int) -> None:
    dialogue = Dialogue([7, 8], CLOSE, 0.0, "math", eos)
    for sampled in (0, 0, 60, CLOSE[0], 61, 61, 61, 62, last):
        assert not dialogue.ended(OPTIONS)
        dialogue.say(sampled, OPTIONS)
    assert dialogue.text == [7, 8, 60, *CLOSE, 62, last]
    assert dialogue.ended(OPTIONS)


def test_turns_are_sampled_and_answers_follow_their_own_temperature() -> None:
    dialogue = Dialogue([7], CLOSE, 0.0, "math", EOS)
    seen = []
    for sampled in (0, 60, CLOSE[0], 0, 0, 0, 61):
        dialogue.say(sampled, OPTIONS)
        seen.append(dialogue.next_temperature(OPTIONS))
    assert seen == [OPTIONS.turn_temperature] * 5 + [0.0, 0.0]


def test_hidden_states_are_those_of_one_pass_over_the_whole_text(folder: Path) -> None:
    target = Target(folder)
    rows = tokenise(MANY, folder, Generation(answers=((0.0, 1.0),)))
    prefix, suffix = shared_prefix(rows), shared_suffix(rows)
    dialogues = plan_dialogues(rows, prefix, suffix, OPTIONS, 0, target.shape.eos)[:9]
    for sample in write_on(target, list(rows[0].tokens[:prefix]), dialogues, OPTIONS, seed=1):
        size = sample.tokens.numel()
        aux, final = target.prefill(sample.tokens[None].long(), Cache(target.shape, 1, size))
        torch.testing.assert_close(sample.aux.float(), aux[0, :-1], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(sample.final.float(), final[0, sample.first + 1 : -1], rtol=2e-3, atol=2e-3)
        assert is_usable(sample)
        assert (
            tuple(sample.tokens[sample.prompt_tokens - suffix : sample.prompt_tokens].tolist())
            == (rows[0].tokens[-suffix:])
        )
        if sample.temperature == 0:
            greedy = target.logits(final[0, sample.prompt_tokens - 1 : -1]).argmax(-1)
            assert torch.equal(greedy, sample.tokens[sample.prompt_tokens :].long())


def test_dialogues_take_every_domain_equally_often_and_only_the_prompts_words(folder: Path) -> None:
    rows = tokenise(MANY, folder, Generation(answers=((0.0, 1.0),)))
    prefix, suffix = shared_prefix(rows), shared_suffix(rows)
    dialogues = plan_dialogues(rows, prefix, suffix, OPTIONS, 0, EOS)
    counts = [sum(d.domain == domain for d in dialogues) for domain in ("math", "code", "chat")]
    assert min(counts) > 0 and max(counts) - min(counts) <= 1
    words = {row.tokens[prefix : len(row.tokens) - suffix] for row in rows}
    for dialogue in dialogues:
        assert any(tuple(dialogue.opening_words()) == w[: dialogue.opening] for w in words)
    again = plan_dialogues(rows, prefix, suffix, OPTIONS, 0, EOS)
    assert [d.opening_words() for d in again] == [d.opening_words() for d in dialogues]
    other = plan_dialogues(rows, prefix, suffix, OPTIONS, 1, EOS)
    assert [d.opening_words() for d in other] != [d.opening_words() for d in dialogues]


def test_a_longer_run_goes_on_from_a_shorter_one(folder: Path, tmp_path: Path) -> None:
    (first,) = write_variations(folder, MANY, tmp_path, OPTIONS, workers=1)
    written = first.stat().st_mtime_ns
    shards = write_variations(folder, MANY, tmp_path, replace(OPTIONS, batches=2), workers=1)
    assert shards[0] == first and first.stat().st_mtime_ns == written
    one, two = ([s.tokens.tolist() for s in load_samples([shard])] for shard in shards)
    assert one != two
    assert write_variations(folder, MANY, tmp_path, replace(OPTIONS, batches=0), workers=1) == []
