"""Where a server's step cost comes from: the profile, a file of an earlier one, SGLang's own file."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from benchmarks.launch import CPU_ENVIRONMENT, CPU_FLAGS, Server
from sglang_dspark.cost import CostTable, read_table, save_table
from sglang_dspark.engine.step_cost import has_tiers, profile_limit
from tests.engine.conftest import base, dspark, greedy, refusal


@pytest.fixture(scope="module")
def profiled(pairs, tmp_path_factory):
    """A table that the command line measured, for the servers of this file."""
    out = tmp_path_factory.mktemp("cost") / "cost.json"
    command = [
        *(sys.executable, "-m", "sglang_dspark.cli", "profile", "--out", str(out), "--seconds", "3", "--json", "--"),
        *(*CPU_FLAGS, *base(pairs.target), "--speculative-draft-model-path", str(pairs.eagle3)),
    ]
    done = subprocess.run(
        command, env={**os.environ, **CPU_ENVIRONMENT}, stdout=subprocess.PIPE, text=True, timeout=400
    )
    assert done.returncode == 0
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["table"] == read_table(out)[1].summary() and printed["key"]["backend"] == "intel_amx"
    return out


def test_a_measured_table_is_used_in_place_of_the_profile(pairs, profiled, prompts, expected):
    with dspark(pairs.target, pairs.eagle3, env={"DSPARK_COST_TABLE": str(profiled)}) as server:
        cost = server.info()["dspark"]["cost"]
        assert cost == {"source": str(profiled), "table": read_table(profiled)[1].summary()}
        assert greedy(server, prompts) == expected
        assert server.info()["dspark"]["modes"] != {} and server.info()["dspark"]["faults"] == {}


def test_a_start_without_the_file_writes_it(pairs, profiled, tmp_path):
    path = tmp_path / "new" / "cost.json"
    with dspark(pairs.target, pairs.eagle3, env={"DSPARK_COST_TABLE": str(path)}) as server:
        cost = server.info()["dspark"]["cost"]
    assert cost["source"] == "profile" and cost["table"] == read_table(path)[1].summary()
    assert 0 < cost["share_of_start"] < 1
    assert read_table(path)[0] == read_table(profiled)[0]


def test_a_server_that_is_told_nothing_of_its_device_reads_what_it_wrote(pairs, tmp_path, prompts, expected):
    """As people start it. What SGLang decides by itself is None in the arguments of the command line."""
    path = tmp_path / "cost.json"
    said = ("--dtype", "float32", "--disable-cuda-graph", "--mem-fraction-static", "0.5", "--skip-server-warmup")
    draft = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(pairs.eagle3))
    env = {"DSPARK_PROFILE_SECONDS": "2", "DSPARK_COST_TABLE": str(path)}
    for source in ("profile", str(path)):
        with Server(*base(pairs.target), *draft, env=env, flags=said) as server:
            assert server.info()["dspark"]["cost"]["source"] == source
            assert greedy(server, prompts[:4]) == expected[:4] and server.info()["dspark"]["faults"] == {}
    key, _ = read_table(path)
    assert "None" not in json.dumps(key) and key["backend"] == "intel_amx"


@pytest.mark.parametrize(
    "tiers, padded, captured, fits",
    [
        (None, None, None, True),
        ((4, 8), (1, 5), None, True),  # stairs that the profile found
        ((4, 8), None, (4, 8), True),
        ((4, 8), None, (4, 8, 16), False),
        ((4, 8), None, None, False),
        (None, None, (4, 8), False),
        ((4, 8), (1, 5), (4, 8), False),
    ],
)
def test_a_table_of_other_graphs_is_not_used(tiers, padded, captured, fits):
    assert has_tiers(CostTable((1, 8), (0.1, 0.2), tiers=tiers, padded=padded), captured) is fits


def test_sglangs_own_file_prices_the_target_and_the_profile_the_draft(pairs, tmp_path, prompts, expected):
    path = tmp_path / "sps.json"
    path.write_text(json.dumps({"sample_batch_tokens": [1, 8, 64], "sample_steps_per_sec": [400.0, 200.0, 50.0]}))
    with dspark(pairs.target, pairs.eagle3, "--speculative-dspark-sps-table-path", str(path)) as server:
        cost = server.info()["dspark"]["cost"]
        assert cost["source"] == str(path) and cost["table"]["ms"] == [2.5, 5.0, 20.0]
        assert cost["table"]["draft_ms"] != [0, 0, 0] and cost["table"]["extend_ms"] != [0, 0, 0]
        assert greedy(server, prompts) == expected


@pytest.mark.parametrize(
    "given, started, limit", [(None, 20, 10), (None, 200, 10), (None, 1200, 60), (3, 1200, 3), (0, 1200, 0)]
)
def test_the_profile_takes_ten_seconds_or_a_twentieth_of_a_long_start(given, started, limit):
    assert profile_limit(given, started) == limit


@pytest.mark.parametrize(
    "field, value", [("model", "another"), ("draft", "another"), ("device", "cuda"), ("sglang", "0.5.22"), ("tp", 2)]
)
def test_a_table_measured_on_something_else_is_refused(resolve, profiled, tmp_path, monkeypatch, field, value):
    from sglang_dspark.cost import CostKey

    key, table = read_table(profiled)
    path = tmp_path / "cost.json"
    save_table(path, dataclasses.replace(CostKey(**key), **{field: value}), table)
    monkeypatch.setenv("DSPARK_COST_TABLE", str(path))
    sentence = refusal(resolve)
    assert str(path) in sentence and field in sentence and repr(value) in sentence


def test_a_damaged_file_or_two_files_are_refused(resolve, tmp_path, monkeypatch):
    path = tmp_path / "cost.json"
    path.write_bytes(b"\x80\x04not json")
    assert str(path) in refusal(lambda: resolve("--speculative-dspark-sps-table-path", str(path)))
    monkeypatch.setenv("DSPARK_COST_TABLE", str(path))
    assert str(path) in refusal(resolve)
    assert "give one of them" in refusal(lambda: resolve("--speculative-dspark-sps-table-path", str(path)))
    monkeypatch.setenv("DSPARK_COST_TABLE", str(tmp_path))
    assert "is a folder" in refusal(resolve)
