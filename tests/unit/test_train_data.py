"""Which prompts a draft may learn from, and how they are read."""

import json
from pathlib import Path

import pytest

from sglang_dspark.train.data import Prompt, is_left_out, read_prompts
from sglang_dspark.train.generate import Generation, tokenise
from sglang_dspark.train.pipeline import split
from tests.train_tiny import write_target

PROMPTS = [Prompt(f"question number {i}", "gsm8k") for i in range(400)]


def test_no_left_out_prompt_is_trained_on() -> None:
    kept, left = split(PROMPTS, 0.15, seed=0)
    assert not {p.text for p in kept} & {p.text for p in left}
    assert len(kept) + len(left) == len(PROMPTS)
    assert 0.08 < len(left) / len(PROMPTS) < 0.22  # 400 draws of 0.15: 4 standard deviations


def test_split_depends_on_the_text_alone() -> None:
    _, left = split(PROMPTS, 0.15, seed=0)
    again = [p for p in reversed(PROMPTS) if is_left_out(p.text, 0.15, 0)]
    assert {p.text for p in again} == {p.text for p in left}
    _, other = split(PROMPTS, 0.15, seed=1)
    assert {p.text for p in other} != {p.text for p in left}


def test_a_prompt_in_two_files_counts_once(tmp_path: Path) -> None:
    for name in ("gsm8k", "math"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"turns": ["same", "second turn"]}) + "\n")
    assert read_prompts(tmp_path) == [Prompt("same", "gsm8k")]


BAD_LINES = (
    b"",
    b"{",
    b"\xff",
    b"1",
    b"null",
    b"[]",
    b'"turns"',
    b"{}",
    b'{"turns": null}',
    b'{"turns": "hello"}',
    b'{"turns": {"0": "hello"}}',
    b'{"turns": []}',
    b'{"turns": [""]}',
    b'{"turns": [null]}',
    b'{"turns": [1]}',
    b'{"turns": [["hello"]]}',
    b'{"turns": [{"role": "user", "content": "hello"}]}',
    b'{"turns": ["half a \\ud83d"]}',
)


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "gsm8k.jsonl").write_bytes(b'{"turns": ["fine"]}\n' + line + b'\n{"turns": ["fine, too"]}\n')
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl:2: expected") as refused:
        read_prompts(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("end", ("\u2028", "\u2029", "\x85"))
@pytest.mark.parametrize("newline", ("\n", "\r\n"))
def test_line_ends_of_unicode_are_part_of_a_prompt(tmp_path: Path, end: str, newline: str) -> None:
    texts = [f"one{end}prompt", f"{end}another{end}"]
    lines = [json.dumps({"turns": [text]}, ensure_ascii=False) for text in texts]
    (tmp_path / "gsm8k.jsonl").write_bytes((newline.join(lines) + newline).encode())
    assert [prompt.text for prompt in read_prompts(tmp_path)] == texts


def test_a_folder_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.jsonl"):
        read_prompts(tmp_path)


def test_long_prompts_are_left_aside_and_the_chat_template_applied(tmp_path: Path) -> None:
    target = write_target(tmp_path)
    short, long = Prompt("hi", "math"), Prompt("x" * 200, "math")
    rows = tokenise([short, long], target, Generation(max_prompt_tokens=100, answers=((0.0, 1.0),)))
    assert len(rows) == 1
    assert rows[0].tokens[0] == 1 and 2 in rows[0].tokens  # <|im_start|> opens, <|im_end|> closes the user's turn
    assert rows[0].domain == "math" and rows[0].temperatures == (0.0,)
