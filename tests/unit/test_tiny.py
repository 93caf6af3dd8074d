"""The tiny models are what engine tests take them for: loadable, varied, and accepted sometimes, not always."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sglang_dspark.engine.cpu.torchvision_schemas import define_if_missing
from tests.tiny import TinyPairs, build
from tests.tiny.build import SEED, build_chi, build_talking, reproducible
from tests.tiny.checkpoint import load_draft, load_dspark, load_target
from tests.tiny.drafts import rollout
from tests.tiny.dspark import draft_blocks
from tests.tiny.language import make_language
from tests.tiny.model import Llama, generate
from tests.tiny.prompts import beginnings, ending
from tests.tiny.simulate import Chains, draft_chains, mean_accepted_length
from tests.tiny.tokenizer import END, syllable_tokenizer

PROMPT, GENERATED = 20, 120
TALKING_DRAFTS = ("eagle3", "eagle3_full", "eagle", "nextn")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models of this size are slower on two threads, and slowest when those are fought over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pairs(one_thread) -> TinyPairs:
    return build()


@pytest.fixture(scope="module")
def target(pairs: TinyPairs) -> Llama:
    return load_target(pairs.target)


@pytest.fixture(scope="module")
def end() -> int:
    return syllable_tokenizer().token_to_id(END)


def speak(target: Llama, prompts: Tensor, count: int, temperature: float) -> Tensor:
    temperatures = torch.full((len(prompts),), temperature)
    return generate(target, prompts, count, temperatures, torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def greedy(target: Llama, end: int) -> Tensor:
    """Greedy continuations of 48 sampled prompts, int64 [48, PROMPT + GENERATED]."""
    prompts = speak(target, torch.full((48, 1), end), PROMPT - 1, 1.0)
    return speak(target, prompts, GENERATED, 0.0)


def chains_of(folder: Path, target: Llama, texts: Tensor, steps: int) -> Chains:
    draft, own = load_draft(folder)
    return draft_chains(draft, target, texts, steps, own)


def test_any_text_survives_the_tokenizer(pairs: TinyPairs):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pairs.target)
    for text in (*beginnings(4), "Hello, Wörld!\n\t日本 <b>2 + 2</b>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|user|>Hi<|end|><|assistant|>"
    assert len(tokenizer(chat).input_ids) == 5
    assert tokenizer.eos_token == END


def test_every_word_is_one_token_a_syllable():
    language, tokenizer = make_language(SEED), syllable_tokenizer()
    for word in range(len(language.words)):
        assert len(tokenizer.encode(" " + language.spelled(word)).ids) == len(language.words[word])


@pytest.mark.parametrize("name", ["target", "chi_target"])
def test_the_checkpoint_is_a_llama(pairs: TinyPairs, name: str):
    define_if_missing()  # transformers imports torchvision
    from transformers import LlamaForCausalLM

    ours = load_target(getattr(pairs, name))
    theirs = LlamaForCausalLM.from_pretrained(getattr(pairs, name), dtype=torch.float32)
    tokens = torch.randint(ours.shape.vocab, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-4, rtol=0)


def test_nextn_holds_the_same_target(pairs: TinyPairs, target: Llama):
    twin = load_target(pairs.nextn)
    for name, weight in target.state_dict().items():
        assert torch.equal(weight, twin.state_dict()[name]), name


def test_greedy_output_keeps_going_and_does_not_loop(greedy: Tensor, end: int):
    written = greedy[:, PROMPT:]
    assert ((written[:, :64] != end).all(1)).float().mean() > 0.5
    for row in written.tolist():
        grams = [tuple(row[i : i + 8]) for i in range(len(row) - 8)]
        assert len(set(grams)) > 0.5 * len(grams)
    assert len({tuple(row) for row in written.tolist()}) == len(written)


def test_sampled_output_ends_now_and_then(target: Llama, greedy: Tensor, end: int):
    ended = (speak(target, greedy[:, :PROMPT], GENERATED, 1.0)[:, PROMPT:] == end).any(1).float().mean()
    assert 0.2 < ended < 0.95


@pytest.mark.parametrize("name", TALKING_DRAFTS)
def test_acceptance_is_useful_and_varies_with_context(pairs: TinyPairs, target: Llama, greedy: Tensor, name: str):
    chains = chains_of(getattr(pairs, name), target, greedy, 8)
    assert 2.0 < mean_accepted_length(chains, 5, PROMPT) < 4.5
    reached = chains.hits[:, PROMPT:].long().cumprod(-1).sum((0, 1))
    conditional = reached[1:] / reached[:-1]
    assert (conditional > 0.4).all()  # the eighth position is still worth a try
    before = greedy[:, 1 : 1 + chains.hits.shape[1]]
    rates = [chains.hits[..., 0][before == t].float().mean() for t in before.unique() if (before == t).sum() >= 20]
    assert sum(rate > 0.95 for rate in rates) >= 5
    assert sum(rate < 0.5 for rate in rates) >= 5
    assert min(rates) < 0.3


def test_reduced_vocabulary_holds_the_end_but_not_all_that_is_said(pairs: TinyPairs, greedy: Tensor, end: int):
    _, own = load_draft(pairs.eagle3)
    weights = load_file(pairs.eagle3 / "model.safetensors")
    assert end in own
    assert torch.equal(weights["t2d"].nonzero()[:, 0], own)
    undraftable = 1 - torch.isin(greedy[:, PROMPT:], own).float().mean()
    assert 0.03 < undraftable < 0.3


@pytest.mark.parametrize("name", TALKING_DRAFTS)
def test_drafts_run_through_the_end_token(pairs: TinyPairs, target: Llama, end: int, name: str):
    prompt = torch.tensor([syllable_tokenizer().encode(ending()).ids[-90:]])
    texts = speak(target, prompt, 12, 0.0)
    assert (texts[0, prompt.shape[1] :] == end).nonzero()[0] == 5
    accepted = chains_of(getattr(pairs, name), target, texts, 5).accepted(5)
    assert accepted[0, prompt.shape[1] - 1] == 5  # the bonus is the first written token; the end is the chain's fifth


def test_chi_pair_can_be_counted(pairs: TinyPairs):
    target = load_target(pairs.chi_target)
    draft, own = load_draft(pairs.chi_eagle3)
    assert torch.equal(own, torch.arange(target.shape.vocab))  # rejection sampling needs one vocabulary
    texts = speak(target, torch.full((64, 1), 2), 40, 1.0)
    with torch.no_grad():
        seen = target(texts)
        p = seen.logits.softmax(-1)
        entropy = -(p * p.log2()).sum(-1).mean()
        assert 2.0 < entropy < 3.6
        assert p[..., :2].sum(-1).mean() < 0.01  # the specials hardly take part
        for ahead, (logits, _) in enumerate(rollout(draft, target, texts, seen, 3), 1):
            valid = texts.shape[1] - 1 - ahead
            q, goal = logits[:, :valid].softmax(-1), p[:, ahead : ahead + valid]
            assert 0.4 < torch.minimum(q, goal).sum(-1).mean() < 0.9
            assert 0.15 < goal.gather(-1, q.argmax(-1, keepdim=True)).mean() < 0.7


def test_blocks_are_accepted_at_times_and_their_confidence_tells_when(pairs: TinyPairs, target: Llama, greedy: Tensor):
    draft = load_dspark(pairs.dspark)
    anchors = torch.arange(PROMPT, greedy.shape[1] - draft.gamma)
    tokens, confidence = draft_blocks(draft, target, greedy, anchors)
    hits = tokens == greedy[:, anchors[:, None] + 1 + torch.arange(draft.gamma)]
    reached = torch.ones_like(hits[..., 0])
    for position in range(draft.gamma):
        hit, chance = hits[..., position][reached], confidence[..., position][reached]
        assert 0.4 < hit.float().mean() < 0.9
        assert chance[hit].mean() > chance[~hit].mean() + 0.02
        reached &= hits[..., position]


def test_misfits_differ_from_the_target_in_one_size(pairs: TinyPairs, target: Llama):
    vocab = load_draft(pairs.misfit_vocab)[0].lm_head.weight.shape
    hidden = load_draft(pairs.misfit_hidden)[0].lm_head.weight.shape
    assert vocab[0] != target.shape.vocab and vocab[1] == target.shape.hidden
    assert hidden[0] == target.shape.vocab and hidden[1] != target.shape.hidden


def test_a_second_build_of_the_same_source_writes_nothing(pairs: TinyPairs):
    files = [file for file in pairs.target.parent.rglob("*") if file.is_file()]
    before = [file.stat().st_mtime_ns for file in files]
    assert build() == pairs
    assert [file.stat().st_mtime_ns for file in files] == before


def _weights(pairs: TinyPairs, name: str) -> bytes:
    return (getattr(pairs, name) / "model.safetensors").read_bytes()


def _elsewhere(folder: Path) -> TinyPairs:
    return TinyPairs(**{field.name: folder / field.name for field in fields(TinyPairs)})


def test_building_the_chi_pair_again_gives_the_same_weights(pairs: TinyPairs, tmp_path: Path):
    again = _elsewhere(tmp_path)
    with reproducible():
        build_chi(again)
    for name in ("chi_target", "chi_eagle3", "chi_dspark"):
        assert _weights(pairs, name) == _weights(again, name)


@pytest.mark.long
def test_building_the_talking_pairs_again_gives_the_same_weights(pairs: TinyPairs, tmp_path: Path):
    again = _elsewhere(tmp_path)
    with reproducible():
        build_talking(again)
    for name in ("target", *TALKING_DRAFTS, "dspark"):
        assert _weights(pairs, name) == _weights(again, name)
