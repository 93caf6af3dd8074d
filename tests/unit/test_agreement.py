"""Ranks that were started differently are refused, all with the same sentence."""

from sglang_dspark.engine.agreement import refuse_differences

ALIKE = {"version": "1", "num_steps": 4, "profile_seconds": 10.0, "cost_table": None}


def test_ranks_that_were_started_alike_pass():
    refuse_differences([ALIKE, dict(ALIKE), dict(ALIKE)])
    refuse_differences([ALIKE])
