"""Builds every tiny model into one folder, once for one state of the builder's source."""

import fcntl
import hashlib
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from tests.tiny import checkpoint
from tests.tiny.drafts import Eagle, Eagle3, Mtp
from tests.tiny.dspark import DSpark, fit_dspark
from tests.tiny.fit import fit_draft, fit_target
from tests.tiny.language import Language, closing_sentence, document, make_language
from tests.tiny.model import Llama, Shape, generate
from tests.tiny.tokenizer import (
    ASSISTANT,
    END,
    USER,
    letter_tokenizer,
    save_tokenizer,
    syllable_tokenizer,
)

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "build" / "tiny"
SEED = 7
ROW = 112  # tokens a training row
CHI_LETTERS = "abcdefghijklmn"  # 14 letters and 2 specials: 196 pairs and 2,744 triples to count
DRAFT_VOCAB = 48  # most frequent of the 87 tokens that the talking target writes; the rarest one in ten has no draft


def _source_digest() -> str:
    """SHA-256 over this package's files and the torch version: what the weights depend on."""
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


# Read at import: a process that outlives an edit of these files must not stamp old code's weights with the new hash.
SOURCE_DIGEST = _source_digest()


@dataclass(frozen=True)
class TinyPairs:
    """Folders of the built models.

    target: LlamaForCausalLM that speaks tests.tiny.language; eagle3 (reduced draft vocabulary), eagle3_full (the whole
    vocabulary), eagle and dspark (a block of 5 with a confidence head) are its drafts. nextn: the same target as
    MiMoForCausalLM with an MTP layer inside. chi_target, chi_eagle3, chi_eagle3_part (the same draft, which
    cannot propose a third of the tokens), chi_dspark (a block of 3): 16 tokens, smooth next-token distribution, for
    counting sequences.
    misfit_vocab, misfit_hidden: EAGLE3 drafts that do not fit `target`.
    """

    target: Path
    eagle3: Path
    eagle3_full: Path
    eagle: Path
    dspark: Path
    nextn: Path
    chi_target: Path
    chi_eagle3: Path
    chi_eagle3_part: Path
    chi_dspark: Path
    misfit_vocab: Path
    misfit_hidden: Path


def build(out_dir: Path | str = DEFAULT_FOLDER) -> TinyPairs:
    """Make the models in `out_dir` unless it holds those of this very source; safe to call from several processes."""
    root = Path(out_dir)
    root.parent.mkdir(parents=True, exist_ok=True)
    pairs = TinyPairs(**{f.name: root / f.name for f in fields(TinyPairs)})
    stamp = root / "source.sha256"
    with open(root.parent / f".{root.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == SOURCE_DIGEST):
            shutil.rmtree(root, ignore_errors=True)
            for part in (build_talking, build_chi):
                with reproducible():
                    part(pairs)
            stamp.write_text(SOURCE_DIGEST)
    return pairs


@contextmanager
def reproducible() -> Iterator[None]:
    """Seeded, on one thread: sums then have one order. The caller's generator and threads are left as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield
    torch.set_num_threads(threads)


def build_talking(pairs: TinyPairs) -> None:
    """The target, its nextn twin, and their drafts. The step counts and rates were tuned for seconds, not for the last
    point: eval loss 0.53 nats a token where the language's own entropy is about 0.4."""
    tokenizer, language = syllable_tokenizer(), make_language(SEED)
    end = tokenizer.token_to_id(END)
    rows, learn = talking_rows(language, Random(SEED), 1600)
    shape = Shape(tokenizer.get_vocab_size(), hidden=64, intermediate=128)
    target = Llama(shape)
    fit_target(target, rows, learn, steps=200, batch=8, rate=1e-2)
    texts = own_texts(target, rows[:320, :16], 80)

    eagle3 = Eagle3(shape)
    eagle3.lm_head.load_state_dict(target.lm_head.state_dict())
    eagle3.norm.load_state_dict(target.model.norm.state_dict())
    fit_draft(eagle3, target, texts, depth=5, steps=150, batch=4, rate=2e-2)
    eagle = Eagle(shape)
    fit_draft(eagle, target, texts, depth=3, steps=70, batch=6, rate=1e-2)
    mtp = Mtp(shape)
    fit_draft(mtp, target, texts, depth=3, steps=70, batch=6, rate=1e-2)
    dspark = DSpark(shape, gamma=5)
    fit_dspark(dspark, target, texts, steps=150, batch=4, rate=2e-2)

    checkpoint.save_target(target, pairs.target, end)
    checkpoint.save_nextn(target, mtp, pairs.nextn, end)
    kept = draft_vocabulary(texts, [end, *tokenizer.encode(closing_sentence(language)).ids])
    checkpoint.save_eagle3(eagle3, shape, pairs.eagle3, end, kept)
    checkpoint.save_eagle3(eagle3, shape, pairs.eagle3_full, end)
    checkpoint.save_eagle(eagle, shape, pairs.eagle, end)
    checkpoint.save_dspark(dspark, shape, pairs.dspark, end)
    other_vocab = Shape(shape.vocab + 64, hidden=64, intermediate=128)
    checkpoint.save_eagle3(Eagle3(other_vocab), other_vocab, pairs.misfit_vocab, end)
    other_hidden = Shape(shape.vocab, hidden=96, intermediate=128)
    checkpoint.save_eagle3(Eagle3(other_hidden), other_hidden, pairs.misfit_hidden, end)
    for folder in (pairs.target, pairs.nextn):
        save_tokenizer(tokenizer, folder)


def build_chi(pairs: TinyPairs) -> None:
    """The counting pair: a target trained on a random Markov chain, and a draft that has seen little of it, so that
    draft and target disagree by some tenths."""
    tokenizer = letter_tokenizer(CHI_LETTERS)
    end = tokenizer.token_to_id(END)
    shape = Shape(tokenizer.get_vocab_size(), hidden=32, intermediate=64)
    generator = torch.Generator().manual_seed(SEED)
    target = Llama(shape)
    rows = markov_rows(len(CHI_LETTERS), 256, 48, generator) + shape.vocab - len(CHI_LETTERS)
    fit_target(target, rows, torch.ones_like(rows, dtype=torch.bool), steps=80, batch=16, rate=1e-2)
    draft = Eagle3(shape)
    texts = own_texts(target, rows[:64, :4], 44)
    fit_draft(draft, target, texts, depth=3, steps=80, batch=4, rate=2e-2)
    dspark = DSpark(shape, gamma=3, rank=8)
    fit_dspark(dspark, target, texts, steps=40, batch=4, rate=2e-2)
    checkpoint.save_target(target, pairs.chi_target, end)
    save_tokenizer(tokenizer, pairs.chi_target)
    checkpoint.save_eagle3(draft, shape, pairs.chi_eagle3, end)
    kept = torch.tensor([token for token in range(shape.vocab) if token % 3])
    checkpoint.save_eagle3(draft, shape, pairs.chi_eagle3_part, end, kept)
    checkpoint.save_dspark(dspark, shape, pairs.chi_dspark, end)


def talking_rows(language: Language, rng: Random, count: int) -> tuple[Tensor, Tensor]:
    """Packed documents, plain, after letters that mean nothing, or as an answer in a chat: rows[count, ROW] and
    learn[count, ROW], which is False where the prompt's author, not the target, speaks."""
    tokenizer = syllable_tokenizer()
    user, end, assistant = (tokenizer.encode(s).ids for s in (USER, END, ASSISTANT))
    ids: list[int] = []
    learn: list[bool] = []
    while len(ids) < count * ROW:
        text = document(language, rng)
        kind = rng.choices(("plain", "noise", "chat"), (0.5, 0.2, 0.3))[0]
        if kind == "plain":
            prompt = []
        elif kind == "noise":
            prompt, text = tokenizer.encode(noise(rng)).ids, " " + text
        else:
            asked = noise(rng) if rng.random() < 0.5 else text.split(". ")[-2]
            prompt = user + tokenizer.encode(asked).ids + end + assistant
        answer = tokenizer.encode(text).ids + end
        ids += prompt + answer
        learn += [False] * len(prompt) + [True] * len(answer)
    used = count * ROW
    return torch.tensor(ids[:used]).view(count, ROW), torch.tensor(learn[:used]).view(count, ROW)


def noise(rng: random.Random) -> str:
    """One to four words of random printable characters: what a prompt in another language looks like to the target."""
    characters = "abcdefghijklmnopqrstuvwxyz" * 3 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?()'-+=/"
    return " ".join("".join(rng.choices(characters, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 4)))


def markov_rows(states: int, count: int, length: int, generator: torch.Generator) -> Tensor:
    """int64 [count, length] from a random Markov chain. Logits of spread 1.5 make the likeliest successor about 0.4 and
    keep the entropy at 2.8 bits: most pairs come often enough to be counted."""
    chances = (1.5 * torch.randn(states, states, generator=generator)).softmax(-1)
    column = torch.randint(states, (count,), generator=generator)
    columns = [column]
    for _ in range(length - 1):
        column = torch.multinomial(chances[column], 1, generator=generator)[:, 0]
        columns.append(column)
    return torch.stack(columns, 1)


def own_texts(target: Llama, prompts: Tensor, count: int) -> Tensor:
    """What the target writes after `prompts`: every second row greedily, the others at temperature 1."""
    temperature = (torch.arange(len(prompts)) % 2).float()
    return generate(target, prompts, count, temperature, torch.Generator().manual_seed(SEED))


def draft_vocabulary(texts: Tensor, needed: list[int]) -> Tensor:
    """The most frequent token ids of `texts`, and `needed` (the end must be draftable): int64, ascending."""
    frequent = texts.flatten().bincount().argsort(descending=True, stable=True)[:DRAFT_VOCAB]
    return torch.cat((frequent, torch.tensor(needed))).unique()
