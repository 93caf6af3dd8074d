"""The step trace: what was written comes back, within its bound, and damage is told from data."""

import json
from pathlib import Path

import numpy as np
import pytest

from sglang_dspark.config import Refusal, read_options
from sglang_dspark.observe import TraceWriter, read_trace
from sglang_dspark.observe.trace import record_type

GAMMA, FEATURES, RULES = 3, ("logit", "margin"), ("greedy", "sampled")


def writer(path, limit=1 << 20):
    return TraceWriter(path, GAMMA, FEATURES, RULES, limit)


def step(number, requests=4, **changes):
    rng = np.random.default_rng(number)
    fields = {
        "step": number,
        "request": rng.integers(0, 1 << 40, requests),
        "rule": rng.integers(0, 2, requests),
        "clean": rng.random(requests) < 0.5,
        "depth": 2,
        "verified": np.full(requests, 2),
        "accepted": rng.integers(0, 3, requests),
        "budget": 8,
        "tokens": 12,
        "kv_tokens": 70_000,
        "seconds": np.float32(0.25),
        "recent": rng.random(requests, np.float32),
        "shown": rng.random((requests, GAMMA, len(FEATURES)), np.float32),
        "confidence": rng.random((requests, GAMMA), np.float32),
    }
    return {**fields, **changes}


def test_what_was_written_comes_back(tmp_path):
    path = tmp_path / "t"
    out = writer(path)
    steps = [step(n, requests=n + 1) for n in range(5)]
    for fields in steps:
        out.write(len(fields["rule"]), **fields)
    trace = read_trace(path)  # the server still has it open
    assert (trace.gamma, trace.features, trace.rules) == (GAMMA, FEATURES, RULES)
    assert len(trace.records) == 15
    for name in trace.records.dtype.names:
        expected = np.concatenate([np.broadcast_to(f[name], (len(f["rule"]), *np.shape(f[name])[1:])) for f in steps])
        assert np.array_equal(trace.records[name], expected), name


def test_the_file_never_grows_past_its_bound_and_holds_whole_steps(tmp_path, caplog):
    path, limit = tmp_path / "t", 2000
    out = writer(path, limit)
    for n in range(100):
        out.write(4, **step(n))
    assert path.stat().st_size <= limit
    records = read_trace(path).records
    assert 0 < len(records) < 400 and len(records) % 4 == 0
    assert [f"{path} is full" in message for message in caplog.messages] == [True]


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, caplog):
    out = writer(tmp_path / "t")
    with Path("/dev/full").open("wb", buffering=0) as full:
        out._file = full
        for n in range(3):
            out.write(4, **step(n))
    assert ["No space left" in message for message in caplog.messages] == [True]


def test_a_new_server_starts_a_new_trace_but_never_inside_anothers(tmp_path):
    path = tmp_path / "t"
    first = writer(path)
    first.write(4, **step(0))
    with pytest.raises(OSError):
        writer(path)
    assert len(read_trace(path).records) == 4
    first.close()
    writer(path)
    assert len(read_trace(path).records) == 0


def test_a_record_cut_short_is_left_out(tmp_path):
    path = tmp_path / "t"
    writer(path).write(4, **step(0))
    path.write_bytes(path.read_bytes()[:-5])
    assert len(read_trace(path).records) == 3


def rewritten_header(**changes):
    def damage(data):
        line, rest = data.split(b"\n", 1)
        return json.dumps({**json.loads(line), **changes}).encode() + b"\n" + rest

    return damage


BAD = {
    "empty": lambda data: b"",
    "not JSON": lambda data: b"\x80\x04" + data,
    "no header": lambda data: data.split(b"\n", 1)[1],
    "other version": rewritten_header(format="sglang-dspark-trace/0"),
    "no positions": rewritten_header(gamma=0),
    **{f"{gamma:.0e} positions": rewritten_header(gamma=gamma) for gamma in (256, 2**31, 10**18, 10**308, -1)},
    "positions beyond floats": rewritten_header(gamma=10**400),
    "infinite positions": rewritten_header(gamma=float("inf")),
    "features no names": rewritten_header(features=[1]),
    "features no list": rewritten_header(features=7),
    "another layout": rewritten_header(gamma=GAMMA + 1),
    "shifted": lambda data: data.replace(b"\n", b"\n\xff", 1),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_refused(name, tmp_path):
    path = tmp_path / "t"
    out = writer(path)
    for n in range(8):
        out.write(4, **step(n))
    path.write_bytes(BAD[name](path.read_bytes()))
    with pytest.raises(ValueError, match=str(path)):
        read_trace(path)


@pytest.mark.parametrize("changes", [{"accepted": 3}, {"verified": 3}, {"depth": 4}, {"rule": 2}])
def test_a_record_that_contradicts_itself_is_refused(changes, tmp_path):
    path = tmp_path / "t"
    writer(path).write(4, **step(0, **changes))
    with pytest.raises(ValueError, match="record 0 contradicts itself"):
        read_trace(path)


def test_a_record_has_the_documented_size():
    assert record_type(5, 3).itemsize == 4 + 8 + 5 + 3 * 4 + 4 + 4 + 60 + 20


def test_the_option_names_a_file_and_a_bound(tmp_path):
    file = str(tmp_path / "t")
    assert read_options({}).trace is None
    plain, bounded = read_options({"DSPARK_TRACE": file}), read_options({"DSPARK_TRACE": f"{file}:3"})
    assert str(plain.trace) == str(bounded.trace) == file
    assert plain.trace_bytes == 256 << 20 and bounded.trace_bytes == 3 << 20


@pytest.mark.parametrize("text", ["{}/t:", "{}/t:0", "{}/t:-1", "{}/t:1.5", "{}/t:99999999", "{}/no/t", "{}", "{}/t:²"])
def test_a_wrong_option_is_refused(text, tmp_path):
    with pytest.raises(Refusal, match="DSPARK_TRACE="):
        read_options({"DSPARK_TRACE": text.format(tmp_path)})


def test_a_disk_that_fills_up_in_mid_step_leaves_whole_steps(tmp_path):
    out = writer(tmp_path / "t")
    out.write(4, **step(1))
    short = out._file

    class Full:
        def write(self, content):
            return short.write(content[:100])

        truncate = short.truncate

    out._file = Full()
    out.write(4, **step(2))
    out.write(4, **step(3))
    assert read_trace(tmp_path / "t").records["step"].tolist() == [1] * 4
    assert (tmp_path / "t").stat().st_size == out._size
