"""The trainer's own decoding gives what the model gives: same tokens, same hidden states, found again after a stop."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_dspark.train.data import Prompt
from sglang_dspark.train.generate import (
    Generation,
    answer,
    choose,
    generate,
    plan_batches,
    shard_folder,
    shared_prefix,
    tokenise,
)
from sglang_dspark.train.store import load_samples
from sglang_dspark.train.target import Target
from tests.train_tiny import PROMPTS, set_options, write_target

OPTIONS = Generation(max_new_tokens=12, answers=((0.0, 1.0), (0.8, 1.0)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def samples_of(folder: Path, prompts: list[Prompt] = PROMPTS, seed: int = 0):
    rows = tokenise(prompts, folder, OPTIONS)
    (batch,) = plan_batches(rows, OPTIONS)
    return answer(Target(folder), batch, shared_prefix(rows), OPTIONS.max_new_tokens, seed)


def test_hidden_states_and_greedy_tokens_equal_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    try:
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
    except ModuleNotFoundError as error:
        pytest.skip(f"transformers cannot import its Llama here: {error}")
    aux_layers = Target(folder).aux_layers
    for sample in samples_of(folder):
        with torch.no_grad():
            out = model(sample.tokens[None].long(), output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer][0] for layer in aux_layers], dim=-1)
        torch.testing.assert_close(sample.aux.float(), aux[:-1], rtol=2e-3, atol=2e-3)
        final = out.hidden_states[-1][0, sample.first + 1 : -1]
        torch.testing.assert_close(sample.final.float(), final, rtol=2e-3, atol=2e-3)
        if sample.temperature == 0:
            given = sample.tokens[sample.prompt_tokens :].long()
            assert torch.equal(out.logits[0, sample.prompt_tokens - 1 : -1].argmax(-1), given)


def test_batched_decoding_equals_decoding_alone(folder: Path) -> None:
    together = [s for s in samples_of(folder) if s.temperature == 0]
    for sample in together:
        size = sample.prompt_tokens
        alone = next(
            s
            for prompt in PROMPTS
            for s in samples_of(folder, [prompt])
            if s.temperature == 0 and torch.equal(s.tokens[:size], sample.tokens[:size])
        )
        assert torch.equal(alone.tokens, sample.tokens)
        torch.testing.assert_close(alone.aux.float(), sample.aux.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("eos", "last"), (((2,), 2), ((0, 2), 2), ((2, 0), 2), ((0, 2), 0), ((0,), 0)))
def test_an_answer_stops_at_any_eos(folder: Path, eos: tuple[int, ...], last: int) -> None:
    target = Target(folder)
    target.shape = replace(target.shape, eos=eos)
    target.head = target.head.clone()
    plain = samples_of(folder)[0]
    # Make one of them the likeliest token wherever the third answer token was.
    third = int(plain.tokens[plain.prompt_tokens + 2])
    target.head[last] = 1.5 * target.head[third]
    rows = tokenise(PROMPTS, folder, OPTIONS)
    (batch,) = plan_batches(rows, OPTIONS)
    samples = answer(target, batch, shared_prefix(rows), OPTIONS.max_new_tokens, 0)
    for sample in samples:
        given = sample.tokens[sample.prompt_tokens :].tolist()
        assert not set(eos) & set(given[:-1])
        assert given[-1] in eos or len(given) == OPTIONS.max_new_tokens
        assert sample.aux.shape[0] == sample.tokens.numel() - 1
        assert sample.final.shape[0] == sample.tokens.numel() - 2 - sample.first
    assert any(s.tokens[-1] == last for s in samples)


def test_sampling_is_seeded_and_follows_the_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0]]).expand(4000, 2)
    warm = torch.full((4000,), 2.0)
    drawn = choose(logits, warm, torch.Generator().manual_seed(5))
    assert torch.equal(drawn, choose(logits, warm, torch.Generator().manual_seed(5)))
    expected = torch.softmax(torch.tensor([2.0, 0.0]) / 2.0, -1)[1]
    assert abs(drawn.float().mean() - expected) < 0.03  # 4 standard deviations of 4,000 draws
    assert choose(logits, torch.zeros(4000), torch.Generator()).sum() == 0


def test_a_run_cut_short_goes_on_and_a_whole_one_is_found(folder: Path, tmp_path: Path) -> None:
    shards = generate(folder, PROMPTS, tmp_path, OPTIONS, workers=1)
    first = [s.tokens.tolist() for s in load_samples(shards)]
    written = shards[0].stat().st_mtime_ns
    assert generate(folder, PROMPTS, tmp_path, OPTIONS, workers=1) == shards
    assert shards[0].stat().st_mtime_ns == written
    shards[0].unlink()
    shards[0].with_suffix(".partial").write_bytes(b"cut short")
    assert generate(folder, PROMPTS, tmp_path, OPTIONS, workers=1) == shards
    assert [s.tokens.tolist() for s in load_samples(shards)] == first
    assert not set(generate(folder, PROMPTS[:2], tmp_path, OPTIONS, workers=1)) & set(shards)


def name_of(target: Path, work: Path) -> str:
    return shard_folder(target, PROMPTS, work, OPTIONS, None, "answers").name


def test_two_targets_of_one_size_have_a_folder_of_data_each(tmp_path: Path) -> None:
    one, other = (write_target(tmp_path / str(seed), seed) for seed in (0, 1))
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (one, other)]
    assert sizes[0] == sizes[1] and (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    assert name_of(one, tmp_path) != name_of(other, tmp_path)
    before = name_of(one, tmp_path)
    (one / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())  # trained on, in its place
    assert name_of(one, tmp_path) == name_of(other, tmp_path) != before


def test_the_same_target_elsewhere_has_the_same_folder_of_data(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("about the model")
    (copy / "source.json").write_text("{}")
    linked = tmp_path / "linked"  # as the Hugging Face cache keeps its files
    linked.mkdir()
    for file in copy.iterdir():
        (linked / file.name).symlink_to(file)
    assert name_of(copy, tmp_path) == name_of(linked, tmp_path) == name_of(folder, tmp_path)


def other_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = dict(zip(content["model"]["vocab"], reversed(range(259)), strict=True))
    path.write_text(json.dumps(content))


def other_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("assistant", "tnatsissa"))


def template_in_a_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def more_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").write_text("{{ messages }}")


def other_special_tokens(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')


def other_options(folder: Path) -> None:
    set_options(folder, rope_theta=20000.0)


def another_file_of_weights(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"more")


EDITS = (
    other_token,
    other_template,
    template_in_a_file,
    more_templates,
    other_special_tokens,
    other_options,
    another_file_of_weights,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_what_an_answer_depends_on_changes_the_folder_of_data(
    folder: Path, tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    before = name_of(copy, tmp_path)
    edit(copy)
    assert name_of(copy, tmp_path) != before
