"""The confidence head: one linear map of what is known before a token is drawn, and files that are refused."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.confidence.features import FEATURES, draft_features
from sglang_dspark.confidence.head import HEAD_FILE, HEAD_RULES, ConfidenceHead, save_head

HIDDEN, WIDTH, VOCAB = 8, 6, 40
COLUMNS = HIDDEN + WIDTH + len(FEATURES)


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(HEAD_RULES), COLUMNS, generator=generator)
    return weight, torch.randn(len(HEAD_RULES), generator=generator), torch.randn(VOCAB, WIDTH, generator=generator)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    weight, bias, _ = tensors()
    save_head(tmp_path / HEAD_FILE, weight, bias, HIDDEN)
    return tmp_path / HEAD_FILE


def test_the_head_is_equation_7_over_normalised_hidden_state_previous_token_and_features(saved: Path) -> None:
    weight, bias, embed = tensors()
    head = ConfidenceHead.load(saved, hidden=HIDDEN, embed=embed)
    hidden, token = 30 * torch.randn(4, 5, HIDDEN), torch.randint(VOCAB, (4, 5))
    features = draft_features(torch.randn(20, 11)).view(4, 5, -1)
    unit = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    expected = torch.cat([unit, embed[token], features], dim=-1) @ weight.T + bias
    torch.testing.assert_close(head(hidden, token, features), expected, rtol=1e-4, atol=1e-4)


def test_all_positions_at_once_equal_one_by_one(saved: Path) -> None:
    _, _, embed = tensors()
    head = ConfidenceHead.load(saved.parent.parent, hidden=HIDDEN, embed=embed)  # a draft's folder
    hidden, token = torch.randn(3, 4, HIDDEN), torch.randint(VOCAB, (3, 4))
    features = torch.randn(3, 4, len(FEATURES))
    together = head(hidden, token, features)
    assert together.shape == (3, 4, len(HEAD_RULES)) and together.dtype == torch.float32
    for k in range(4):
        torch.testing.assert_close(together[:, k], head(hidden[:, k], token[:, k], features[:, k]))


def test_a_certain_draft_gives_a_finite_logit_and_a_broken_one_nan(saved: Path) -> None:
    _, _, embed = tensors()
    head = ConfidenceHead.load(saved, hidden=HIDDEN, embed=embed)
    certain = torch.tensor([[torch.inf, torch.inf, 0.0]])
    assert torch.isfinite(head(torch.randn(1, HIDDEN), torch.tensor([1]), certain)).all()
    assert torch.isfinite(head(torch.zeros(1, HIDDEN), torch.tensor([1]), certain)).all()
    assert torch.isnan(head(torch.full((1, HIDDEN), torch.nan), torch.tensor([1]), certain)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_draft_gets_float32_confidence(saved: Path, dtype: torch.dtype) -> None:
    _, _, embed = tensors()
    whole = ConfidenceHead.load(saved, hidden=HIDDEN, embed=embed)
    half = ConfidenceHead.load(saved, hidden=HIDDEN, embed=embed.to(dtype))
    hidden, token, features = torch.randn(6, HIDDEN), torch.arange(6), torch.randn(6, len(FEATURES))
    logits = half(hidden.to(dtype), token, features)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, whole(hidden, token, features), rtol=0.05, atol=0.1)


def test_an_embedding_larger_than_one_part_gives_every_token_its_own_logit(tmp_path: Path) -> None:
    weight, bias, _ = tensors()
    save_head(tmp_path / "head.safetensors", weight, bias, HIDDEN)
    embed = torch.randn(8192 + 5, WIDTH)
    head = ConfidenceHead.load(tmp_path / "head.safetensors", hidden=HIDDEN, embed=embed)
    expected = embed @ weight[:, HIDDEN : HIDDEN + WIDTH].T + bias
    torch.testing.assert_close(head.token_logits, expected, rtol=1e-4, atol=1e-4)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None]) -> None:
    state = load_file(path)
    metadata = {
        "format": "1",
        "rules": json.dumps(HEAD_RULES),
        "features": json.dumps(FEATURES),
        "hidden_size": str(HIDDEN),
        "embedding_size": str(WIDTH),
    }
    change(state, metadata)
    save_file(state, path, metadata=metadata)


PROJ = "confidence_head.proj.weight"


def cut(state: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    state[PROJ] = state[PROJ][:, 1:].clone()


def poison(state: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    state[PROJ][1, 3] = torch.nan


def overflow(state: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    state["confidence_head.proj.bias"][0] = torch.inf


def whole_numbers(state: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    state[PROJ] = state[PROJ].int()


def double(state: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    state[PROJ] = state[PROJ].double()


def lose_bias(state: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    del state["confidence_head.proj.bias"]


def more(state: dict[str, torch.Tensor], _: dict[str, str]) -> None:
    state["lm_head.weight"] = torch.zeros(2)


def other_features(_: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata["features"] = json.dumps(["entropy", "margin", "logit"])


def newer(_: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata["format"] = "2"


def bare(_: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata.clear()
    metadata["format"] = "pt"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut, "shape"),
        (poison, "NaN"),
        (overflow, "NaN or infinite"),
        (whole_numbers, "type torch.int32"),
        (double, "type torch.float64"),
        (lose_bias, "not a confidence head"),
        (more, "not a confidence head"),
        (other_features, "features"),
        (newer, "its format is 2"),
        (bare, "its format is pt"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_sentence(
    saved: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None], says: str
) -> None:
    rewrite(saved, change)
    refused(saved, says)


def refused(path: Path, says: str, hidden: int = HIDDEN, width: int = WIDTH) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        ConfidenceHead.load(path, hidden=hidden, embed=torch.zeros(VOCAB, width))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_for_another_draft_is_refused(saved: Path) -> None:
    refused(saved, "hidden_size", hidden=HIDDEN + 1)
    refused(saved, "embedding_size", width=WIDTH + 1)


def test_every_truncation_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    for size in [0, 1, 7, 8, 9, len(data) // 2, len(data) - 1]:
        saved.write_bytes(data[:size])
        refused(saved, "safetensors")


def test_noise_and_a_giant_header_are_refused(saved: Path) -> None:
    data = saved.read_bytes()
    for broken in (b"\x00" * 64, b"\xff" * 64, (2**40).to_bytes(8, "little") + data[8:], data + b"more"):
        saved.write_bytes(broken)
        refused(saved, "safetensors")


class Trap:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return (pytest.fail, ("a pickle was run",))


def test_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Trap(), protocol))
        refused(path, "pickled")
    torch.save({"proj": Trap()}, path)
    refused(path, "pickled")
    path.write_bytes(pickle.dumps(Trap(), 0))  # text, with no mark of its own
    refused(path, "safetensors")


def test_a_missing_head_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ConfidenceHead.load(tmp_path, hidden=HIDDEN, embed=torch.zeros(VOCAB, WIDTH))
