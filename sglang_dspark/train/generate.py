"""Answers of the target to prompts, with the hidden states captured while decoding: the draft's training text.

Rows of similar length are decoded together; shards land on disk one by one, so a run cut short goes on where it
stopped. Each worker is a process with one thread: matrix products of two threads wait for the slower one, which on a
busy machine mostly costs over half of their speed (measured beside other processes on two cores of an AMD EPYC: two
threads together 4 to 54 GFLOP/s, a single thread 50 to 86).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from sglang_dspark.train.data import Prompt, digest, unit_hash
from sglang_dspark.train.store import Sample, save_shard
from sglang_dspark.train.target import Cache, Target

# Tokens of KV cache a worker holds at once; 46 kB each for SmolLM2-135M, so 1.9 GB. Gives 160 rows for short prompts,
# past which matrix products stop gaining speed.
CACHE_TOKENS = 40_000
PREFILL_TOKENS = 4096  # tokens of one prefill pass; keeps its activations (12 kB a token and layer) in tens of MB
COMPACT_BELOW = 0.8  # drop finished rows once fewer than this share run; the copy reads the cache once, as a step does


@dataclass(frozen=True)
class Generation:
    """What decides the generated text, together with the target and the prompts."""

    seed: int = 0
    max_prompt_tokens: int = 576
    max_new_tokens: int = 128
    # (temperature, share of the prompts answered at it); 0 is greedy.
    answers: tuple[tuple[float, float], ...] = ((0.0, 1.0), (0.8, 0.3))
    # Stop after so many batches of the seeded plan (None: all of it), for when time is short.
    batches: int | None = None


@dataclass(frozen=True)
class Row:
    """A tokenised prompt and the temperatures it is answered at."""

    tokens: tuple[int, ...]
    domain: str
    temperatures: tuple[float, ...]


def tokenise(prompts: list[Prompt], target: Path, options: Generation) -> list[Row]:
    """Chat-templated prompts, without those over `max_prompt_tokens`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    rows = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        temperatures = tuple(
            t for t, share in options.answers if unit_hash(prompt.text, f"answer-{t}-{options.seed}") < share
        )
        if len(tokens) <= options.max_prompt_tokens and temperatures:
            rows.append(Row(tokens, prompt.domain, temperatures))
    return rows


def shared_prefix(rows: list[Row]) -> int:
    """How many leading tokens all prompts have in common, at most all but two of the shortest."""
    shortest = min(len(row.tokens) for row in rows)
    for i in range(shortest - 2):
        if len({row.tokens[i] for row in rows}) > 1:
            return i
    return shortest - 2


def shared_suffix(rows: list[Row]) -> int:
    """How many final tokens all prompts have in common: what the template puts after the user's words."""
    shortest = min(len(row.tokens) for row in rows)
    for i in range(shortest - 2):
        if len({row.tokens[-1 - i] for row in rows}) > 1:
            return i
    return shortest - 2


def seed_of(shard: Path, options: Generation) -> int:
    """Seed of a shard's sampling: 100,003 is a prime above any number of shards, so no two runs share one."""
    return options.seed * 100_003 + int(shard.stem)


def plan_batches(rows: list[Row], options: Generation) -> list[list[Row]]:
    """Rows by length in batches that fit the cache, in a seeded order: the first batches are a fair sample of all."""
    batches: list[list[Row]] = []
    held = 0
    for row in sorted(rows, key=lambda row: len(row.tokens), reverse=True):
        need = (len(row.tokens) + options.max_new_tokens) * len(row.temperatures)
        if not batches or held + need > CACHE_TOKENS:
            batches.append([])
            held = 0
        batches[-1].append(row)
        held += need
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(options.seed))
    return [batches[i] for i in order.tolist()]


def choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Next tokens [rows]: argmax where the temperature is 0, a sample at the temperature elsewhere."""
    tokens = logits.argmax(-1)
    warm = temperatures > 0
    if warm.any():
        scaled = torch.softmax(logits[warm] / temperatures[warm, None], dim=-1)
        tokens[warm] = torch.multinomial(scaled, 1, generator=generator)[:, 0]
    return tokens


@torch.inference_mode()
def answer(target: Target, rows: list[Row], first: int, max_new_tokens: int, seed: int) -> list[Sample]:
    """Decode every answer of a batch; a sample per row and temperature, in that order, ending at EOS or the limit.

    `first`: see Sample; smaller than every prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(row.tokens) for row in rows])
    widest = int(lengths.max())
    cache = Cache(target.shape, len(rows), widest + max_new_tokens)
    prompt_aux, prompt_final, last = [], [], []
    for begin, tokens in prefill_passes(rows):
        aux, final = target.prefill(tokens, cache, begin)
        for i, row in enumerate(rows[begin : begin + tokens.shape[0]]):
            prompt_aux.append(aux[i, : len(row.tokens)].half())
            prompt_final.append(final[i, first + 1 : len(row.tokens)].half())
            last.append(final[i, len(row.tokens) - 1])
    owner = torch.tensor([i for i, row in enumerate(rows) for _ in row.temperatures])
    temperatures = torch.tensor([t for row in rows for t in row.temperatures])
    cache.take(owner)
    lengths = lengths[owner]
    answers = owner.numel()
    eos = torch.tensor(target.shape.eos)
    text = torch.zeros(answers, max_new_tokens, dtype=torch.int32)
    aux_out = torch.empty(answers, max_new_tokens, prompt_aux[0].shape[-1], dtype=torch.float16)
    final_out = torch.empty(answers, max_new_tokens, target.shape.hidden, dtype=torch.float16)
    size = torch.full((answers,), max_new_tokens)
    alive = torch.arange(answers)
    tokens = choose(target.logits(torch.stack(last)[owner]), temperatures, generator)
    for step in range(max_new_tokens):
        text[alive, step] = tokens.int()
        ended = torch.isin(tokens, eos)
        size[alive[ended]] = size[alive[ended]].clamp(max=step + 1)
        running = size[alive] > step + 1
        if step == max_new_tokens - 1 or not running.any():
            break
        if running.float().mean() < COMPACT_BELOW:
            cache.take(running.nonzero()[:, 0])
            alive, lengths, temperatures, tokens = (x[running] for x in (alive, lengths, temperatures, tokens))
        aux, final = target.decode(tokens, lengths, cache)
        aux_out[alive, step] = aux.half()
        final_out[alive, step] = final.half()
        lengths = lengths + 1
        tokens = choose(target.logits(final), temperatures, generator)
    samples = []
    pairs = [(row, temperature) for row in rows for temperature in row.temperatures]
    for i, (row, temperature) in enumerate(pairs):
        n = int(size[i])
        samples.append(
            Sample(
                tokens=torch.cat([torch.tensor(row.tokens, dtype=torch.int32), text[i, :n]]),
                aux=torch.cat([prompt_aux[int(owner[i])], aux_out[i, : n - 1]]),
                final=torch.cat([prompt_final[int(owner[i])], final_out[i, : n - 1]]),
                prompt_tokens=len(row.tokens),
                first=first,
                domain=row.domain,
                temperature=temperature,
            )
        )
    return samples


def prefill_passes(rows: list[Row]) -> Iterator[tuple[int, Tensor]]:
    """Passes [rows, length] of about PREFILL_TOKENS over rows padded on the right; each with its first row."""
    first = 0
    while first < len(rows):
        width = len(rows[first].tokens)  # rows come longest first
        part = rows[first : first + max(1, PREFILL_TOKENS // width)]
        padded = torch.zeros(len(part), width, dtype=torch.long)
        for i, row in enumerate(part):
            padded[i, : len(row.tokens)] = torch.tensor(row.tokens)
        yield first, padded
        first += len(part)


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks: returning and faulting them again took half of the prefill time. No-op elsewhere."""
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


_worker: list[Target] = []


def _start_worker(target: Path, aux_layers: tuple[int, ...] | None) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    _worker.append(Target(target, aux_layers))


def _write_shard(path: Path, make: Callable[[Target], list[Sample]]) -> int:
    samples = make(_worker[0])
    save_shard(path, samples)
    return sum(sample.tokens.numel() - sample.prompt_tokens for sample in samples)


# What a target computes and how its tokenizer cuts text, by the names that transformers reads.
TARGET_FILES = (
    "*.safetensors",
    "config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
)


@lru_cache(maxsize=1024)
def _file_digest(file: Path, size: int, changed: int) -> str:
    """SHA-256 (hex) of a file; of gigabytes, so read once while its size and time (ns) stay what they are."""
    state = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def target_digests(target: Path) -> list[tuple[str, str]]:
    """(name, SHA-256) of each file of a target that its answers can depend on; alike wherever the folder lies."""
    digests = []
    for file in sorted({file for pattern in TARGET_FILES for file in target.glob(pattern)}):
        about = file.stat()
        name = file.relative_to(target).as_posix()
        digests.append((name, _file_digest(file.resolve(), about.st_size, about.st_mtime_ns)))
    return digests


def shard_folder(
    target: Path, prompts: list[Prompt], work: Path, options: Any, aux_layers: tuple[int, ...] | None, label: str
) -> Path:
    """The folder of generated data, made if need be; its name changes with anything that the data depends on.

    options: a dataclass without what only says how much of the data to make.
    """
    content = json.dumps([target_digests(target), digest(prompts), asdict(options), aux_layers])
    folder = work / f"{label}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_shards(
    target: Path,
    jobs: dict[Path, Callable[[Target], list[Sample]]],
    workers: int,
    aux_layers: tuple[int, ...] | None,
    label: str,
) -> None:
    """Run the picklable jobs of the shards that do not exist yet, each on a worker's own copy of the target."""
    todo = {path: make for path, make in jobs.items() if not path.exists()}
    if not todo:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the workers as they start
    with (
        ProcessPoolExecutor(
            min(workers, len(todo)), multiprocessing.get_context("spawn"), _start_worker, (target, aux_layers)
        ) as pool,
        tqdm(total=len(todo), desc=label, unit="shard") as bar,
    ):
        written = 0
        for future in as_completed([pool.submit(_write_shard, path, make) for path, make in todo.items()]):
            written += future.result()
            bar.update()
            bar.set_postfix(answer_tokens=written)


def generate(
    target: Path,
    prompts: list[Prompt],
    work: Path,
    options: Generation,
    workers: int,
    aux_layers: tuple[int, ...] | None = None,
    label: str = "answers",
) -> list[Path]:
    """Make (or finish, or find) the shards of `prompts` under `work`; returns them in order."""
    # The number of batches does not change what is in each: a longer run goes on from a shorter one.
    folder = shard_folder(target, prompts, work, replace(options, batches=None), aux_layers, label)
    rows = tokenise(prompts, target, options)
    first = shared_prefix(rows)
    jobs = {}
    for i, batch in enumerate(plan_batches(rows, options)[: options.batches]):
        path = folder / f"{i:05d}.safetensors"
        jobs[path] = partial(
            answer, rows=batch, first=first, max_new_tokens=options.max_new_tokens, seed=seed_of(path, options)
        )
    make_shards(target, jobs, workers, aux_layers, label)
    return list(jobs)
