"""The prompts that benchmarks take."""

import pytest

from benchmarks.prompts import choose
from sglang_dspark.train.data import Prompt, is_left_out

PROMPTS = [Prompt(f"{domain} {number}", domain) for domain in ("code", "chat") for number in range(40)]


def test_those_that_training_left_out_so_many_of_each_domain():
    chosen = choose(PROMPTS, 0.5, 5)
    assert [prompt.domain for prompt in chosen] == ["code"] * 5 + ["chat"] * 5
    assert all(is_left_out(prompt.text, 0.5, 0) for prompt in chosen)


@pytest.mark.parametrize("prompts, share", [(PROMPTS[:1], 0.0), (PROMPTS, 0.0), ([], 1.0)])
def test_none_is_one_sentence(prompts, share):
    with pytest.raises(SystemExit, match=rf"^None of {len(prompts)} prompts [^\n]*--prompts[^\n]*\.$"):
        choose(prompts, share, 5)
