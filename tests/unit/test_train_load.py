"""Drafts that are gone on from or get a head: read under every name SGLang takes, or refused, and never half read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.train.export import export
from sglang_dspark.train.load import SHARED, import_draft
from sglang_dspark.train.model import Draft, draft_from_target
from sglang_dspark.train.target import Target
from tests.train_tiny import HIDDEN, VOCAB, set_options, write_target

SIZE = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    return draft_from_target(target, torch.arange(3, 3 + SIZE), torch.ones(3), seed=0)


@pytest.fixture
def folder(draft: Draft, tmp_path: Path) -> Path:
    export(draft, tmp_path, torch.float32)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    """Replace the tensors by what `change` makes of them."""
    path = folder / "model.safetensors"
    save_file(change({name: tensor.clone() for name, tensor in load_file(path).items()}), path)


def same(one: Draft, other: Draft) -> bool:
    weights = dict(other.named_parameters())
    return all(torch.equal(weight, weights[name]) for name, weight in one.named_parameters())


def refused(folder: Path, target: Target, what: str) -> None:
    """In one sentence that names the folder, with the target's embedding and before it is read."""
    for embed in (target.embed, torch.empty(0)):
        with pytest.raises(ValueError, match=what) as error:
            import_draft(folder, target.shape, embed)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)


def newer_names(state):
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}


def whole_names(state):
    outside = ("lm_head.weight", "d2t", "t2d")
    return {name if name in outside else f"model.{name}": tensor for name, tensor in state.items()}


def whole_newer_names(state):
    return whole_names(newer_names(state))


def with_embedding(state):
    return {**state, "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}


def without_t2d(state):
    return {name: state[name] for name in state if name != "t2d"}


SPELLINGS = (newer_names, whole_names, whole_newer_names, with_embedding, without_t2d)


@pytest.mark.parametrize("spell", SPELLINGS, ids=lambda spell: spell.__name__)
def test_every_spelling_that_sglang_takes_gives_the_same_draft(folder: Path, target: Target, draft: Draft, spell):
    rewrite(folder, spell)
    read = import_draft(folder, target.shape, target.embed)
    assert same(read, draft) and torch.equal(read.draft_tokens, draft.draft_tokens)


WEIGHTS = (
    "fc",
    "norm",
    "lm_head",
    *(f"midlayer.{norm}" for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{part}_proj" for part in "qkvo"),
    *(f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down")),
)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_is_missing_or_of_another_shape_is_named(folder: Path, target: Target, name: str) -> None:
    rewrite(folder, lambda state: {**state, f"{name}.weight": state[f"{name}.weight"][:-1]})
    refused(folder, target, rf"{name}\.weight of shape")
    rewrite(folder, lambda state: {n: t for n, t in state.items() if n != f"{name}.weight"})
    refused(folder, target, rf"has no {name}\.weight")


UNKNOWN = (
    "fc.bias",
    "fc_norm.0.weight",
    "aux_norm_low.weight",
    "input_norm.weight",
    "midlayer.self_attn.q_proj.bias",
    "layers.1.mlp.up_proj.weight",
    "decoder.mlp.up_proj.weight",
)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_weight_that_would_be_passed_over_is_named(folder: Path, target: Target, name: str) -> None:
    rewrite(folder, lambda state: {**state, name: torch.ones(HIDDEN)})
    refused(folder, target, "an unknown ")


OTHER = (
    {"num_hidden_layers": 2},
    {"num_aux_hidden_states": 4},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"use_aux_norm": True},
    {"norm_output": True},
    {"tie_word_embeddings": True},
    {"target_hidden_size": 2 * HIDDEN},
    {"bias": True},
    {"attention_bias": True},
    {"hidden_act": "gelu"},
    {"rope_scaling": {"rope_type": "llama3"}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0}},
    {"eagle_config": {"norm_before_fc": True}},
    {"eagle_config": {"use_aux_hidden_state": False}},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
    {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    {"draft_vocab_size": None},
    {"draft_vocab_size": 0},
    {"draft_vocab_size": VOCAB + 1},
    {"draft_vocab_size": SIZE + 1},
)


@pytest.mark.parametrize("options", OTHER, ids=str)
def test_what_sglang_would_compute_otherwise_is_refused(
    folder: Path, target: Target, options: dict[str, object]
) -> None:
    set_options(folder, **options)
    (value,) = options.values()
    # Of a vocabulary other than its head's, the tokens are what does not fit.
    named = "d2t" if options == {"draft_vocab_size": SIZE + 1} else next(iter(options))
    refused(folder, target, next(iter(value)) if named == "eagle_config" else named)


SAME = (
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 1, 3]}},
    {"eagle_config": {"norm_before_fc": False}, "norm_before_fc": True},
    {"eagle_config": None, "fc_norm": None, "norm_output": False},
    {"target_hidden_size": HIDDEN, "num_aux_hidden_states": 3},
    {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": [0, 2]},
    {"rope_theta": ..., "head_dim": ...},
)


@pytest.mark.parametrize("options", SAME, ids=str)
def test_what_changes_nothing_is_taken(folder: Path, target: Target, draft: Draft, options: dict[str, object]) -> None:
    set_options(folder, **options)
    assert same(import_draft(folder, target.shape, target.embed), draft)


@pytest.mark.parametrize("name", SHARED)
def test_a_draft_of_another_targets_sizes_is_refused(folder: Path, target: Target, name: str) -> None:
    set_options(folder, **{name: 1})
    refused(folder, target, f"its {name} is 1")


def test_a_draft_of_the_whole_vocabulary_needs_no_map(target: Target, tmp_path: Path) -> None:
    whole = draft_from_target(target, torch.arange(VOCAB), torch.ones(3), seed=0)
    export(whole, tmp_path, torch.float32)
    rewrite(tmp_path, lambda state: {n: t for n, t in state.items() if n not in ("d2t", "t2d")})
    read = import_draft(tmp_path, target.shape, target.embed)
    assert same(read, whole) and torch.equal(read.draft_tokens, torch.arange(VOCAB))
    export(read, tmp_path / "again", torch.float32)
    assert not load_file(tmp_path / "again/model.safetensors")["d2t"].any()


def no_map(state):
    return {name: state[name] for name in state if name not in ("d2t", "t2d")}


def beyond_the_vocabulary(state):
    return {**state, "d2t": state["d2t"] + VOCAB}


def before_the_vocabulary(state):
    return {**state, "d2t": state["d2t"] - VOCAB}


def one_token_twice(state):
    return {**state, "d2t": state["d2t"].index_put((torch.tensor(1),), state["d2t"][0] - 1)}


def too_few_offsets(state):
    return {**state, "d2t": state["d2t"][:-1].clone()}


def other_tokens_sayable(state):
    return {**state, "t2d": ~state["t2d"]}


def fewer_tokens_sayable(state):
    return {**state, "t2d": state["t2d"][:-1].clone()}


MAPS = (
    no_map, beyond_the_vocabulary, before_the_vocabulary, one_token_twice, too_few_offsets, other_tokens_sayable,
    fewer_tokens_sayable,
)  # fmt: skip


@pytest.mark.parametrize("change", MAPS, ids=lambda change: change.__name__)
def test_a_map_of_tokens_that_does_not_fit_is_refused(folder: Path, target: Target, change) -> None:
    rewrite(folder, change)
    refused(folder, target, "d2t and t2d")


def test_a_damaged_file_is_refused_and_a_missing_one_the_systems_error(folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(folder, target, "not a whole safetensors file")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        import_draft(folder, target.shape, target.embed)


def test_a_draft_goes_out_with_every_token_that_ends_an_answer(target: Target, draft: Draft, tmp_path: Path) -> None:
    several = Draft(replace(target.shape, eos=(0, 2)), target.embed, draft.draft_tokens, draft.aux_scale)
    export(several, tmp_path)
    assert '"eos_token_id": [\n' in (tmp_path / "config.json").read_text()
    export(draft, tmp_path)
    assert '"eos_token_id": 2,' in (tmp_path / "config.json").read_text()
