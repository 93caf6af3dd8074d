"""A random Llama of eight small layers over bytes, as a Hugging Face folder: a target for the trainer's tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_dspark.train.data import Prompt
from sglang_dspark.train.generate import Generation, answer, plan_batches, shared_prefix, tokenise
from sglang_dspark.train.store import Sample
from sglang_dspark.train.target import Target

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = len(SPECIAL) + 256
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 8, 4, 2, 8
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPTS = [Prompt(text, "gsm8k") for text in ("one plus one", "two", "three is a prime number", "four by four")]


def write_target(folder: Path, seed: int = 0) -> Path:
    """Write the model and its tokenizer; weights are large enough that argmax is not a coin toss."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    state = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):
            state[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    state["model.norm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(SPECIAL + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": SPECIAL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def set_options(folder: Path, **options: object) -> None:
    """Set options of the folder's config.json; ``...`` takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **options}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def answers(target: Target, folder: Path, options: Generation) -> list[Sample]:
    """The target's answers to PROMPTS; its tokenizer is written to ``folder``."""
    rows = tokenise(PROMPTS, write_target(folder), options)
    (batch,) = plan_batches(rows, options)
    return answer(target, batch, shared_prefix(rows), options.max_new_tokens, 0)
