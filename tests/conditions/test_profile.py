"""Condition from public reports: a start-up profile that is noisy, not monotone, or wrong in places stays sane."""

import numpy as np
import pytest

from sglang_dspark.cost import CostModel, CostTable, fit_table
from sglang_dspark.schedule import plan_joint
from tests.unit.test_cost import measured, seconds


def decide(table: CostTable, requests: int = 8) -> int:
    """Tokens sent in a typical step: the decision that a damaged table would move."""
    confidence = np.random.default_rng(1).beta(3, 1.5, (requests, 5)).astype(np.float32)
    return requests + plan_joint(confidence, CostModel(table).bind(requests, requests * 512), max_depth=5).budget


TIERS = (8, 16, 24, 32, 40, 48, 64, 96, 128, 192)


def staircase(point) -> float:
    if point.kind != "verify":
        return seconds(point) / 10  # a draft dear enough to be left out would hide what happens to the curve
    return 0.010 + 2e-6 * point.tokens**2 + 1e-8 * point.kv_tokens


def tier_of(tokens: int) -> int:
    return int(np.searchsorted(TIERS, tokens))


@pytest.mark.parametrize("victim", range(0, 150, 7))
def test_c22_one_outlier_of_ten_times_moves_no_decision_by_more_than_a_tier(victim: int):
    samples = measured(staircase, noise=0.02, tiers=TIERS)
    clean = decide(fit_table(samples, tiers=TIERS))
    victim %= len(samples)
    samples[victim] = samples[victim]._replace(seconds=samples[victim].seconds * 10)
    assert abs(tier_of(decide(fit_table(samples, tiers=TIERS))) - tier_of(clean)) <= 1


def test_c22_a_point_that_is_wrong_in_all_its_repeats_moves_no_decision_by_more_than_a_tier():
    samples = measured(staircase, tiers=TIERS)
    clean = decide(fit_table(samples, tiers=TIERS))
    for tokens in TIERS[:-1]:
        spoilt = [
            s._replace(seconds=10 * s.seconds) if s.kind == "verify" and s.tokens == tokens else s for s in samples
        ]
        assert abs(tier_of(decide(fit_table(spoilt, tiers=TIERS))) - tier_of(clean)) <= 1


def test_c22_a_profile_that_is_not_monotone_gives_a_table_that_is():
    samples = measured(noise=0.15, repeats=1, seed=3)
    table = fit_table(samples)
    assert list(table.seconds) == sorted(table.seconds)
    clean = decide(fit_table(measured()))
    assert abs(decide(table) - clean) <= 8
