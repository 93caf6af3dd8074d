"""Which models are trained for: what config.json may ask of a Llama, in the words of both transformers 4 and 5."""

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dspark.train.target import NEEDED, Shape
from tests.train_tiny import HEADS, set_options, write_target

SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
OTHER = (
    *({"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, "factor": 8.0}} for kind in SCALED),
    *({"rope_scaling": {"rope_type": kind, "factor": 8.0}} for kind in SCALED),
    *({"rope_scaling": {"type": kind, "factor": 8.0}} for kind in SCALED),
    {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"model_type": "qwen2"},
    {"model_type": ...},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"bias": True},
    {"hidden_act": "gelu"},
    {"partial_rotary_factor": 0.5},
    {"rope_is_neox_style": False},
    {"quantization_config": {"quant_method": "fp8"}},
)
SAME = (
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_theta": ...},
    {"rope_parameters": {"rope_theta": 10000.0}},
    {"rope_parameters": None, "rope_scaling": None},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_theta": ...},
    {"num_key_value_heads": 2, "head_dim": None},
    {"mlp_bias": None, "attention_bias": False, "hidden_act": "silu", "quantization_config": None},
)


@pytest.mark.parametrize("options", OTHER, ids=str)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, options: dict[str, object]) -> None:
    folder = write_target(tmp_path / "target")
    set_options(folder, **options)
    with pytest.raises(ValueError, match=list(options)[-1]) as refused:
        Shape.read(folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("options", SAME, ids=str)
def test_other_words_for_the_same_model_are_read_alike(tmp_path: Path, options: dict[str, object]) -> None:
    folder = write_target(tmp_path / "target")
    before = Shape.read(folder)
    set_options(folder, **options)
    assert Shape.read(folder) == before


def test_the_base_of_rotary_positions_is_read_where_transformers_5_writes_it(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    for options in ({"rope_theta": 5e5}, {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5}}):
        set_options(folder, **options)
        assert Shape.read(folder).theta == 5e5


def test_heads_that_share_nothing_need_not_be_counted_twice(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    set_options(folder, num_key_value_heads=...)
    assert Shape.read(folder).kv_heads == HEADS


@pytest.mark.parametrize(("named", "eos"), ((2, (2,)), ([2], (2,)), ([0, 2], (0, 2)), ([2, 1, 0], (2, 1, 0))))
def test_one_token_or_several_end_an_answer(tmp_path: Path, named: object, eos: tuple[int, ...]) -> None:
    folder = write_target(tmp_path / "target")
    set_options(folder, eos_token_id=named)
    assert Shape.read(folder).eos == eos


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("value", (..., None))
def test_a_size_that_is_missing_is_named(tmp_path: Path, name: str, value: object) -> None:
    folder = write_target(tmp_path / "target")
    set_options(folder, **{name: value})
    with pytest.raises(ValueError, match=f"lacks {name};"):
        Shape.read(folder)


@pytest.mark.parametrize("content", (b"", b"{", b"[]", b"null", b"\xff\xfe"))
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json .*fetch the model again"):
        Shape.read(tmp_path)


def test_states_are_captured_of_layers_that_are_there(tmp_path: Path) -> None:
    shape = Shape.read(write_target(tmp_path / "target"))
    assert shape.captured() == (2, 4, 5) and shape.captured((0, 7)) == (0, 7)
    for layers in ((0, 8), (-1, 2), (3, 3)):
        with pytest.raises(ValueError, match="cannot capture"):
            shape.captured(layers)
    for layers in (1, 2, 4, 5, 6):
        with pytest.raises(ValueError, match=f"of {layers} layers; name a deeper model"):
            replace(shape, layers=layers).captured()
