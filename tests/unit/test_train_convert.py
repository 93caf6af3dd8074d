"""GGUF to Hugging Face: row order of the projections, names, tokenizer, and nothing written twice."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples/smollm2/convert.py"


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    pytest.importorskip("gguf")
    spec = importlib.util.spec_from_file_location("smollm2_convert", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order llama.cpp writes: row 2 j + h of a head is its row j of half h."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for half in range(2):
            for j in range(size // 2):
                out[head * size + 2 * j + half] = weight[head * size + half * size // 2 + j]
    return out


def test_unpermute_undoes_llama_cpp_row_order(convert: ModuleType) -> None:
    weight = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    assert not np.array_equal(permute(weight, 3), weight)
    np.testing.assert_array_equal(convert.unpermute(permute(weight, 3), 3), weight)


def test_names_of_tensors(convert: ModuleType) -> None:
    assert convert.hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert convert.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(KeyError):
        convert.hf_name("blk.0.ssm_in.weight")


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(convert: ModuleType) -> None:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *alphabet, "12", "ab"]
    meta = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["1 2", "a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "",
        "llama.context_length": 64,
    }
    tokenizer, config = convert.build_tokenizer(meta)
    encoded = tokenizer.encode("ab12<|end|>")
    assert encoded.tokens == ["ab", "1", "2", "<|end|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "ab12<|end|>"
    assert config["additional_special_tokens"] == ["<|end|>"]
