"""Conditions from public reports on tensor-parallel ranks: their floats differ, their decisions must not."""

import dataclasses
from types import SimpleNamespace

import pytest

from sglang_dspark.config import Options, Refusal
from sglang_dspark.cost import CostKey
from sglang_dspark.engine import scheduled
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.scheduled import Scheduled
from tests.unit.agreement_ranks import decide, ranks


@pytest.mark.parametrize("steps", (1_000, pytest.param(10_000, marks=pytest.mark.long)))
def test_c02_two_ranks_whose_confidences_differ_by_an_ulp_at_the_cut_decide_alike(tmp_path, steps):
    (first, *_), (second, plans, lengths) = ranks(tmp_path, decide, (0, 1), steps)
    assert first == second
    assert plans > steps / 100 and lengths > steps / 10  # each on its own would have decided otherwise


KEY = {f.name: 1 if f.type in ("int", int) else "same" for f in dataclasses.fields(CostKey)}
SETTINGS = [*(("options", f.name) for f in dataclasses.fields(Options)), *(("key", name) for name in KEY)]


@pytest.mark.parametrize("place, name", [*SETTINGS, ("gamma", "num_steps"), ("version", "sglang_dspark")])
def test_c17_a_setting_of_one_rank_only_is_refused_at_start_and_named(monkeypatch, place, name):
    def worker(other: bool, gather) -> Scheduled:
        it = object.__new__(Scheduled)
        it.gamma = 5 if other and place == "gamma" else 4
        changed = {name: "another"} if other and place == "options" else {}
        it.options = dataclasses.replace(Options(), **changed)
        it.server_args = SimpleNamespace(
            speculative_dspark_sps_table_path=None, speculative_dspark_confidence_sts_path=None
        )
        it.agreement = Agreement(SimpleNamespace(world_size=2, all_gather_object=gather))
        monkeypatch.setattr(scheduled, "__version__", "another" if other and place == "version" else "1")
        return it

    seen = []
    for other in (False, True):
        key = KEY | ({name: "another"} if other and place == "key" else {})
        worker(other, lambda mine: seen.append(mine) or [mine])._refuse_other_settings(CostKey(**key), None)
    with pytest.raises(Refusal) as refused:
        worker(False, lambda _: seen)._refuse_other_settings(CostKey(**KEY), None)
    assert f"rank 1 was started with {name} " in str(refused.value) and str(refused.value).endswith(".")
