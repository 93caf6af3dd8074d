"""Ranks that were started differently are refused, all with the same sentence."""

import pytest

from sglang_dspark.config import Refusal
from sglang_dspark.engine.agreement import refuse_differences

ALIKE = {"version": "1", "num_steps": 4, "profile_seconds": 10.0, "cost_table": None}


def test_ranks_that_were_started_alike_pass():
    refuse_differences([ALIKE, dict(ALIKE), dict(ALIKE)])
    refuse_differences([ALIKE])


@pytest.mark.parametrize("name", [*ALIKE, "unknown to the others"])
@pytest.mark.parametrize("rank", (1, 2))
def test_any_setting_on_any_rank_that_differs_is_named(name, rank):
    settings = [dict(ALIKE) for _ in range(3)]
    settings[rank][name] = "another"
    with pytest.raises(Refusal) as refused:
        refuse_differences(settings)
    sentence = str(refused.value)
    assert f"rank {rank} was started with {name} 'another'" in sentence and sentence.endswith(".")
