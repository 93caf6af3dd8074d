"""Tokenizers of the tiny models: byte-level syllables for the talking pair, one token a letter for the chi pair."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny.language import SYLLABLES

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIALS = (PAD, USER, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|end|>"
    "{% else %}<|user|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def syllable_tokenizer() -> Tokenizer:
    """Byte-level BPE: 4 specials, 256 bytes, each syllable with and without a space before it. Any text round-trips."""
    space = "Ġ"  # how byte-level BPE spells the space
    pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *SYLLABLES, *(space + s for s in SYLLABLES)]
    merges = [(s[0], s[1]) for s in SYLLABLES] + [(space, s) for s in SYLLABLES]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    return tokenizer


def letter_tokenizer(letters: str) -> Tokenizer:
    """One token a letter after PAD and END; other characters become PAD."""
    pieces = [PAD, END, *letters]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD, special=True), AddedToken(END, special=True)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files from which transformers.AutoTokenizer loads `tokenizer`."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    if tokenizer.token_to_id(USER) is not None:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
