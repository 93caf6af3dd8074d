"""Where an accepted run ends: as if its tokens had been said one by one."""

from array import array
from types import SimpleNamespace

import pytest

from sglang_dspark.engine.stops import finish_token_by_token

WORDS = ["zero", "one", "two", "three", "four"]


class Req(SimpleNamespace):
    def finished(self):
        return self.finished_reason is not None


def request(run, stops, regex=(), grammar=None):
    params = SimpleNamespace(stop_strs=list(stops), stop_regex_strs=list(regex))
    return Req(
        output_ids=array("q", [0, *run]), sampling_params=params, grammar=grammar, to_finish=None,
        finished_reason=None, finished_len=None,
    )  # fmt: skip


def sglangs(req, new):
    """As SGLang looks at a run: stop strings first, in the list's order, then the stop token 4."""
    text = [WORDS[t] for t in req.output_ids[-new:]]
    for stop in req.sampling_params.stop_strs:
        if stop in text:
            req.finished_reason, req.finished_len = stop, len(req.output_ids) - new + text.index(stop) + 1
            return
    if 4 in req.output_ids[-new:]:
        req.finished_reason = "token"


@pytest.mark.parametrize(
    "run, stops, reason, length",
    [
        ([1, 2, 3], ["three", "two"], "two", 3),
        ([1, 2, 3], ["two", "three"], "two", 3),
        ([1, 4, 2], ["two"], "token", 3),
        ([4, 1], ["two"], "token", 2),
        ([1, 1, 1], ["two"], None, None),
    ],
)
def test_what_comes_first_ends_the_run(run, stops, reason, length):
    req = request(run, stops)
    finish_token_by_token(sglangs, req, len(run))
    assert (req.finished_reason, req.finished_len) == (reason, length)
    assert list(req.output_ids) == [0, *run]


def test_runs_without_stop_strings_or_under_a_grammar_are_sglangs_own():
    for req in (request([1, 2], ()), request([1, 2], ["two"], grammar=object())):
        seen = []
        finish_token_by_token(lambda req, new, seen=seen: seen.append(new), req, 2)
        assert seen == [2]
