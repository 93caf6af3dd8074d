"""Fitting is seeded, the draft vocabulary consistent, and the exported folder what SGLang's loader expects by name."""

import importlib.util
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dspark.confidence.head import HEAD_FILE
from sglang_dspark.train.export import export
from sglang_dspark.train.fit import Fitting, fit, is_finished, learning_rate, load_draft, plan_steps
from sglang_dspark.train.generate import Generation, generate
from sglang_dspark.train.load import import_draft
from sglang_dspark.train.store import load_samples
from sglang_dspark.train.target import Target
from sglang_dspark.train.vocab import choose_draft_tokens, coverage
from tests.train_tiny import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, PROMPTS, VOCAB, write_target

OPTIONS = Fitting(draft_vocab=64, epochs=2, answers_per_step=3, steps=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    options = Generation(max_new_tokens=16, answers=((0.0, 1.0), (0.8, 1.0)))
    return generate(target, PROMPTS, tmp_path_factory.mktemp("work"), options, workers=1)


@pytest.fixture(scope="module")
def fitted(target: Path, data: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(target, data, tmp_path_factory.mktemp("fit"), OPTIONS, workers=1)


def test_fitting_twice_gives_the_same_weights(target: Path, data: list[Path], fitted: Path, tmp_path: Path) -> None:
    folder = fit(target, data, tmp_path, OPTIONS, workers=1)
    again, first = (torch.load(f / "draft.pt", weights_only=True) for f in (folder, fitted))
    assert all(torch.equal(first[name], again[name]) for name in first)
    steps = json.loads((folder / "fit.json").read_text())["steps"]
    assert len(steps) == 2 * 3  # 8 answers, 3 a step, twice over


def test_a_finished_fit_is_found_and_an_unfinished_one_done_again(target: Path, data: list[Path], fitted: Path) -> None:
    written = (fitted / "draft.pt").stat().st_mtime_ns
    assert fit(target, data, fitted.parent, OPTIONS, workers=1) == fitted
    assert (fitted / "draft.pt").stat().st_mtime_ns == written
    record = json.loads((fitted / "fit.json").read_text())
    (fitted / "fit.json").write_text(json.dumps({**record, "finished": False}))
    assert fit(target, data, fitted.parent, OPTIONS, workers=1) == fitted
    assert (fitted / "draft.pt").stat().st_mtime_ns > written
    assert fit(target, data, fitted.parent, replace(OPTIONS, seed=1), workers=1) != fitted


@pytest.mark.parametrize("content", ("", "{", '{"finished": tr', "null", "[]", "{}", "\x00\x00"))
def test_a_log_that_was_cut_is_of_an_unfinished_fit(tmp_path: Path, content: str) -> None:
    assert not is_finished(tmp_path)
    (tmp_path / "fit.json").write_text(content)
    assert not is_finished(tmp_path)


def test_a_log_that_cannot_be_finished_leaves_the_old_one(
    target: Path, data: list[Path], fitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fitted / "fit.json"
    unfinished = json.dumps({**json.loads(log.read_text()), "finished": False})
    log.write_text(unfinished)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fsync", full)
        fit(target, data, fitted.parent, OPTIONS, workers=1)
    torch.distributed.destroy_process_group()
    assert log.read_text() == unfinished and not list(fitted.glob("*.tmp"))
    assert fit(target, data, fitted.parent, OPTIONS, workers=1) == fitted and is_finished(fitted)


def test_two_processes_fit_as_one_does(target: Path, data: list[Path], tmp_path: Path) -> None:
    # Each process averages over its own tokens, so with unequal answers the gradients are near, not equal.
    options = Fitting(draft_vocab=64, epochs=1, answers_per_step=4, steps=1, prompt_share=1.0)
    still = replace(options, learning_rate=0.0)

    def fc(options: Fitting, workers: int) -> torch.Tensor:
        return torch.load(fit(target, data, tmp_path, options, workers) / "draft.pt", weights_only=True)["fc.weight"]

    start = fc(still, 1)
    one, two = fc(options, 1) - start, fc(options, 2) - start
    assert two.norm() > 0
    assert torch.nn.functional.cosine_similarity(one.flatten(), two.flatten(), dim=0) > 0.9


def test_known_answers_are_drawn_anew_each_epoch_and_fresh_ones_always(data: list[Path]) -> None:
    samples = load_samples(data)
    known, fresh = samples[:6], samples[6:]
    options = Fitting(epochs=2, answers_per_step=2, known_share=0.5)
    steps = plan_steps(known, fresh, options)
    half = len(steps) // 2
    drawn = [{id(s) for step in part for s in step} for part in (steps[:half], steps[half:])]
    for ids in drawn:
        assert {id(s) for s in fresh} <= ids and len(ids & {id(s) for s in known}) == 3
    assert drawn[0] != drawn[1]
    assert {id(s) for step in plan_steps([], samples, options) for s in step} == {id(s) for s in samples}


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    options = Fitting(warmup=0.1)
    assert learning_rate(0.05, options) == pytest.approx(0.5)
    assert learning_rate(0.1, options) == pytest.approx(1.0)
    assert learning_rate(1.0, options) == pytest.approx(0.0)


def test_draft_vocabulary_takes_what_is_frequent_and_fills_up_by_merge_rank() -> None:
    counts = torch.zeros(1000, dtype=torch.float64)
    counts[[900, 950, 999]] = torch.tensor([500.0, 400.0, 300.0], dtype=torch.float64)
    tokens = choose_draft_tokens(counts, 50, prior_tokens=100.0)
    assert tokens.tolist() == [*range(47), 900, 950, 999]
    assert coverage(tokens, counts) == 1.0
    assert coverage(torch.tensor([900]), counts) == pytest.approx(500 / 1200)


def test_exported_tensors_have_the_names_and_shapes_sglang_loads(target: Path, fitted: Path, tmp_path: Path) -> None:
    draft = load_draft(fitted, Target(target))
    size = export(draft, tmp_path, torch.float32)
    state = load_file(tmp_path / "model.safetensors")
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert shapes == {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (64, HIDDEN),
        "d2t": (64,),
        "t2d": (VOCAB,),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 64 and config["vocab_size"] == VOCAB
    assert config["tie_word_embeddings"] is False  # tied, SGLang would take the embedding for the head


def test_a_new_draft_does_not_keep_the_head_of_the_old_one(target: Path, fitted: Path, tmp_path: Path) -> None:
    head = tmp_path / HEAD_FILE
    head.parent.mkdir()
    head.write_bytes(b"of the draft before")
    (tmp_path / "metrics.json").write_text("{}")
    export(load_draft(fitted, Target(target)), tmp_path)
    assert not head.exists() and (tmp_path / "metrics.json").exists()


def test_names_match_the_loader_in_sglangs_source(fitted: Path) -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    source = (Path(spec.submodule_search_locations[0]) / "srt/models/llama_eagle3.py").read_text()
    for attribute in ("fc", "norm", "embed_tokens"):
        assert re.search(rf"self\.{attribute} = ", source)
    assert '"midlayer": "layers.0"' in source
    assert "self.hot_token_id = loaded_weight + torch.arange" in source


def test_d2t_and_t2d_describe_the_same_tokens(target: Path, fitted: Path, tmp_path: Path) -> None:
    draft = load_draft(fitted, Target(target))
    export(draft, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    tokens = state["d2t"] + torch.arange(64)
    assert torch.equal(tokens, draft.draft_tokens)
    assert torch.equal(state["t2d"].nonzero()[:, 0], tokens)
    assert bool((tokens[1:] > tokens[:-1]).all())


def test_the_scale_of_captured_states_is_folded_into_fc(target: Path, fitted: Path, tmp_path: Path) -> None:
    whole = Target(target)
    draft = load_draft(fitted, whole)
    assert not torch.allclose(draft.aux_scale, torch.ones(3))
    export(draft, tmp_path, torch.float32)
    shipped = import_draft(tmp_path, whole.shape, whole.embed)
    aux = torch.randn(5, 3 * HIDDEN)
    torch.testing.assert_close(shipped.start(aux), draft.start(aux), rtol=1e-4, atol=1e-5)


def test_a_fit_goes_on_from_an_exported_draft(target: Path, data: list[Path], fitted: Path, tmp_path: Path) -> None:
    export(load_draft(fitted, Target(target)), tmp_path, torch.float32)
    still = replace(OPTIONS, learning_rate=0.0, epochs=1)
    draft = load_draft(fit(target, data, tmp_path, still, 1, start=tmp_path), Target(target))
    before = load_draft(fitted, Target(target))
    for name, weight in before.named_parameters():
        torch.testing.assert_close(dict(draft.named_parameters())[name], weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(draft.draft_tokens, before.draft_tokens)
    assert fit(target, data, tmp_path, still, 1) != fit(target, data, tmp_path, still, 1, start=tmp_path)
