"""Whatever the DSPARK_* variables and the files they name say: options that can be used, or one sentence of refusal."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_dspark.confidence.calibration import load_calibration
from sglang_dspark.confidence.head import read_head
from sglang_dspark.config import NAMES, Options, Refusal, allowed_sglang, read_options
from sglang_dspark.cost import CostKey, load_sps_table, load_table
from sglang_dspark.observe import read_trace

# What an environment can hold: no NUL.
VALUES = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.sampled_from(
        (
            "", " ", "0", "-1", "1e400", "nan", "inf", "-0", "1_0", "٣", "600.0000001", "off", "OFF", ".", "..",
            "/", "//", ":", "::", ":5", "a:", "a:0", "a:1", "a:-1", "a:1048577", "a:" + "9" * 5000, "x" * 300,
            "/" + "y/" * 3000, "a\nb", "'", "~", "\udc80", "/dev/null", "/proc/self/mem", "/no/such/y", "os:path",
            "a.b:c", "a..b:c", "1:2", "a:b:c", "a b:c",
        )
    ),
    st.floats().map(str),
    st.integers().map(str),
)  # fmt: skip


def is_one_sentence(error, *names):
    sentence = str(error)
    assert sentence.endswith(".") and "\n" not in sentence and "Traceback" not in sentence
    assert all(name in sentence for name in names)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NAMES), VALUES)
@example("DSPARK_TRACE", "t:" + "9" * 5000)
@example("DSPARK_TRACE", "x" * 300)
@example("DSPARK_COST_TABLE", "x" * 300)
@example("DSPARK_CONFIDENCE_HEAD", "/" + "y/" * 3000)
@example("DSPARK_POLICY", ":")
@example("DSPARK_POLICY", "a b:c")
def test_a_variable_is_an_option_or_one_sentence(name, value):
    try:
        options = read_options({name: value})
    except Refusal as refusal:
        is_one_sentence(refusal, name)
        assert value  # an empty variable is one that is not set
        return
    assert options.profile_seconds is None or 0 <= options.profile_seconds <= 600
    assert 1 << 20 <= options.trace_bytes <= 1 << 40
    assert options.trace is None or (options.trace.parent.is_dir() and not options.trace.is_dir())
    assert options.cost_table is None or not options.cost_table.is_dir()
    assert options.head in (None, "off") or options.head.exists()
    assert options.policy is None or options.policy.count(":") == 1
    assert allowed_sglang({name: value}) in (None, value)
    if not value:
        assert options == Options()


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_characters="\0="), min_size=1), VALUES)
def test_a_variable_that_is_no_option_is_named_in_one_sentence(rest, value):
    name = f"DSPARK_{rest}"
    if name in NAMES:
        return
    with pytest.raises(Refusal) as refusal:
        read_options({name: value})
    assert "\n" not in str(refusal.value) or "\n" in rest


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([name for name in NAMES if name != "DSPARK_ALLOW_SGLANG"]), VALUES))
def test_several_variables_are_as_good_as_each(environ):
    def refused(given):
        try:
            read_options(given)
        except Refusal:
            return True
        return False

    assert refused(environ) == any(refused({name: value}) for name, value in environ.items())


@pytest.mark.parametrize("name", ("DSPARK_TRACE", "DSPARK_COST_TABLE", "DSPARK_CONFIDENCE_HEAD"))
def test_a_folder_that_may_not_be_read_is_refused(monkeypatch, name):
    def closed(path, **_):  # what a folder of another user's does to everyone but root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(Refusal) as refusal:
        read_options({name: "/closed/file"})
    is_one_sentence(refusal.value, name)


KEYS = (
    "format", "key", "table", "tokens", "seconds", "tiers", "temperatures", "source", "samples", "ece_before", "gamma",
    "padded", "greedy", "features", "rules", "limit", "sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(KEYS), inner),
    max_leaves=12,
)
FORMATS = ("sglang-dspark-cost/2", "sglang-dspark-calibration/1", "sglang-dspark-trace/1")
CONTENTS = st.one_of(
    st.binary(max_size=200),
    JSON.map(lambda value: json.dumps(value).encode() + b"\n"),
    st.builds(
        lambda form, rest: json.dumps({**rest, "format": form}).encode() + b"\n" + b"\0" * 100,
        st.sampled_from(FORMATS),
        st.dictionaries(st.sampled_from(KEYS), JSON),
    ),
)
ODD = (b"", b"PK\x03\x04", b"\x80\x04", b"[" * 4000, b"9" * 5000, b"\xff\xfe", b'{"format": NaN}')
KEY = CostKey("m", "d", "f", "c", "b", 1, 1, 1, "0")
READERS = {
    "cost table": lambda path: load_table(path, KEY),
    "SGLang's cost": load_sps_table,
    "calibration": lambda path: load_calibration(path, ("greedy", "sampled"), 5),
    "head": lambda path: read_head(path, hidden=8, width=8),
    "trace": read_trace,
}


@pytest.mark.parametrize("reader", READERS)
def test_any_file_is_read_or_refused_in_one_line(tmp_path_factory, reader):
    path = tmp_path_factory.mktemp("any") / "file"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            READERS[reader](path)
        except ValueError as error:
            assert type(error) in (ValueError, Refusal), repr(error)
            assert "\n" not in str(error) and str(path) in str(error), repr(error)[:1000]

    for content in ODD:
        check(content)
    settings(max_examples=15, deadline=None)(given(CONTENTS)(check))()


def test_a_file_that_is_not_there_is_an_error_that_names_it():
    for reader in READERS.values():
        with pytest.raises((FileNotFoundError, ValueError), match="nowhere"):
            reader(Path("/nowhere/file"))
