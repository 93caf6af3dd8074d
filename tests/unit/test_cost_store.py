"""Saved cost tables: what is read back, what is refused and in which words, and SGLang's own files."""

import dataclasses
import importlib.util
import json
import stat
import sys
from pathlib import Path

import pytest

from sglang_dspark.cost import CostKey, CostModel, CostTable, load_sps_table, load_table, save_table

KEY = CostKey(
    model="target",
    draft="draft",
    dtype="float32",
    device="cpu, 2 threads",
    backend="intel_amx",
    tp=1,
    dp=1,
    ep=1,
    sglang="0.5.23",
)
TABLE = CostTable((8, 16), (0.01, 0.02), per_request=0.001, draft_fixed=0.002, tiers=(8, 16))


def test_a_table_comes_back_as_it_was(tmp_path: Path):
    path = tmp_path / "new folder" / "cost.json"
    save_table(path, KEY, TABLE)
    assert load_table(path, KEY) == TABLE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["cost.json"]  # no temporary file stays behind


def test_saving_over_a_table_replaces_it(tmp_path: Path):
    path = tmp_path / "cost.json"
    save_table(path, KEY, TABLE)
    save_table(path, KEY, dataclasses.replace(TABLE, per_request=0.5))
    assert load_table(path, KEY).per_request == 0.5


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CostKey)])
def test_a_table_measured_on_something_else_is_refused_with_what_differs(tmp_path: Path, field: str):
    path = tmp_path / "cost.json"
    save_table(path, KEY, TABLE)
    other = dataclasses.replace(KEY, **{field: 2 if field in ("tp", "dp", "ep") else "another"})
    with pytest.raises(ValueError) as refused:
        load_table(path, other)
    message = str(refused.value)
    assert str(path) in message and field in message and repr(getattr(KEY, field)) in message
    assert message.count("\n") == 0 and message.endswith(".")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"format": "other/1"}',
        json.dumps({"format": "sglang-dspark-cost/2"}),
        json.dumps({"format": "sglang-dspark-cost/2", "key": dataclasses.asdict(KEY)}),
        json.dumps({"format": "sglang-dspark-cost/2", "key": dataclasses.asdict(KEY), "table": {"tokens": [1]}}),
        json.dumps(
            {
                "format": "sglang-dspark-cost/2",
                "key": dataclasses.asdict(KEY),
                "table": {**dataclasses.asdict(TABLE), "seconds": ["a", "b"]},
            }
        ),
        json.dumps(
            {
                "format": "sglang-dspark-cost/2",
                "key": dataclasses.asdict(KEY),
                "table": {**dataclasses.asdict(TABLE), "seconds": [0.02, 0.01]},
            }
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cost\.json"):
        load_table(path, KEY)


# JSON that no table of ours holds: of another type, or more than a number of Python, NumPy or a step can be.
ODD = (
    *("null", '"1"', '"ab"', "[]", "{}", '{"1": 1}', "[[1], [2]]", '["a", "b"]', "[null, 1]", "[1.5, 2.5]"),
    *("1e999", "-1e999", "NaN", f"1{'0' * 400}", f"[1, 1{'0' * 400}]", "[1, 1e999]", f"[1, {10**30}]", "-1"),
)
MEANT = {("seconds", "[1.5, 2.5]"), ("tiers", "null"), ("padded", "null"), ("padded", "[]"), ("padded", "{}")}


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:12])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CostTable)])
def test_an_odd_value_is_refused_in_one_sentence(tmp_path: Path, field: str, odd: str):
    if (field, odd) in MEANT:
        return
    path = tmp_path / "cost.json"
    save_table(path, KEY, TABLE)
    content = json.loads(path.read_text())
    content["table"][field] = "HERE"
    path.write_text(json.dumps(content).replace('"HERE"', odd))
    with pytest.raises(ValueError, match=r"cost\.json is damaged \(.*\); delete it to profile again\.$") as refused:
        load_table(path, KEY)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400 + len(str(path))


def test_a_missing_file_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none\.json"):
        load_table(tmp_path / "none.json", KEY)


def test_sglangs_table_of_steps_per_second_is_read_and_made_monotone(tmp_path: Path):
    path = tmp_path / "sps.json"
    rates = {"sample_batch_tokens": [8, 16, 32], "sample_steps_per_sec": [100.0, 50.0, 80.0], "max_batch_tokens": 64}
    path.write_text(json.dumps(rates))
    table = load_sps_table(path, tiers=(8, 16, 32))
    assert table.tokens == (8, 16, 32) and table.seconds == (0.01, 0.0125, 0.0125)
    assert CostModel(table).step_time(8, 5, [9], 0)[0] == 0.0125  # the tier above, where SGLang prices the one below


def test_sglangs_additive_table_is_read(tmp_path: Path):
    path = tmp_path / "additive.json"
    path.write_text(
        json.dumps(
            {
                "bias_seconds": 0.005,
                "bs_probes": [1, 8, 64],
                "alpha_seconds": [0.0011, 0.0018, 0.0074],
                "m_probes": [8, 64],
                "theta_seconds": [0.001, 0.004],
            }
        )
    )
    model = CostModel(load_sps_table(path))
    assert model.step_time(8, 3, [64], 0)[0] == pytest.approx(0.005 + 0.0018 + 0.004, rel=1e-3)


def rates(tokens: str, values: str) -> str:
    return f'{{"sample_batch_tokens": {tokens}, "sample_steps_per_sec": {values}}}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "null", "5", '"bias_seconds"', "[" * 100_000, rates("[1, 2]", "[1.0]")),
        *(rates("[1, 2]", f"[2, {odd}]") for odd in ("0", "-1", "NaN", "1e999", f"1{'0' * 400}", "null", "[1]")),
        *(rates(f"[1, {odd}]", "[2, 1]") for odd in (10**30, f"1{'0' * 400}", "1e999", "NaN", 2**31, "null", 1, 0)),
        *(rates(odd, odd) for odd in ("5", "[]", '{"a": 1}', "null")),
    ],
    ids=lambda text: text[:72],
)
def test_an_unusable_sglang_file_is_refused_with_its_flag(tmp_path: Path, text: str):
    path = tmp_path / "sps.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--speculative-dspark-sps-table-path"):
        load_sps_table(path)


def test_both_formats_are_the_ones_sglang_writes(tmp_path: Path):
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        pytest.skip("SGLang is not installed")
    # The file by itself, for SGLang as a whole takes long to import.
    path = Path(package.origin).parent / "srt/speculative/dspark_components/dspark_sps.py"
    spec = importlib.util.spec_from_file_location("dspark_sps", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dspark_sps"] = module  # msgspec resolves annotations there
    spec.loader.exec_module(module)
    plain = module.SpsCostTable(sample_batch_tokens=[8, 16], sample_steps_per_sec=[100.0, 50.0], max_batch_tokens=16)
    additive = module.SpsAdditiveCostTable(0.005, [1, 8], [0.0, 0.0], [8, 16], [0.001, 0.002])
    path = tmp_path / "sps.json"
    path.write_text(plain.to_json())
    assert load_sps_table(path).seconds == (0.01, 0.02)
    path.write_text(additive.to_json())
    assert load_sps_table(path).seconds == pytest.approx((0.006, 0.007))


def test_a_target_table_takes_only_the_draft_terms_and_the_tiers_of_another():
    measured = CostTable(
        (1,), (9.0,), per_request=9.0, draft_start=0.1, draft_fixed=0.2, extend_per_token=0.3, tiers=(6, 12)
    )
    joined = TABLE.with_draft_terms_of(measured)
    assert (joined.draft_start, joined.draft_fixed, joined.extend_per_token) == (0.1, 0.2, 0.3)
    assert joined == dataclasses.replace(TABLE, draft_start=0.1, draft_fixed=0.2, extend_per_token=0.3, tiers=(6, 12))
