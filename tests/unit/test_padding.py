"""Counts to pad to: those that no larger one undercuts, and beyond the measured ones only a pattern seen twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.cost import CostModel, Sample, fit_table, profile_grid
from sglang_dspark.cost.padding import GAIN, PERIOD, WINDOW, counts_to_pad_to

# ms of 1, 2, ... 16 tokens of SmolLM2-135M on one CPU core in float32, as a profile measured them.
SMOLLM2 = [66, 98, 119, 86, 97, 99, 109, 104, 118, 116, 128, 118, 135, 127, 144, 136]


def test_what_is_dearer_than_a_larger_count_is_padded_and_the_pattern_goes_on():
    tiers = counts_to_pad_to(SMOLLM2, 40)
    assert tiers[:9] == (1, 4, 5, 6, 8, 9, 10, 12, 14)
    # 4k + 3 twice, 4k + 1 only once among the last eight: 13, not 9
    assert tiers[9:] == (16, 17, 18, 20, 21, 22, 24, 25, 26, 28, 29, 30, 32, 33, 34, 36, 37, 38, 40, 41, 42, 44)


@pytest.mark.parametrize(
    "seconds",
    ([1.0] * 16, list(range(1, 17)), [1 + 0.005 * (i % 2) for i in range(16)], [1.0], [2.0, 3.0]),
    ids=("flat", "rising", "noise", "one", "two"),
)
def test_without_dips_nothing_is_padded(seconds):
    assert counts_to_pad_to(seconds, 64) is None


def test_a_dip_that_does_not_come_back_is_no_pattern():
    seconds = [1.0 + 0.1 * i for i in range(16)]
    seconds[11] = seconds[8]  # 12 tokens cost what 9 do: a block of 12, not of 4
    tiers = counts_to_pad_to(seconds, 48)
    assert 10 not in tiers and 11 not in tiers
    assert set(range(13, 49)) <= set(tiers)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=WINDOW), st.integers(1, 200))
def test_a_padded_count_is_never_dearer_where_it_was_measured_and_never_far_where_not(seconds, most):
    tiers = counts_to_pad_to(seconds, most)
    if tiers is None:
        return
    assert list(tiers) == sorted(set(tiers)) and tiers[0] >= 1
    padded = {count: min(t for t in tiers if t >= count) for count in range(1, tiers[-1] + 1)}
    for count, to in padded.items():
        if to <= len(seconds):
            assert seconds[to - 1] <= seconds[count - 1]
        else:
            assert to - count < PERIOD
    if len(seconds) == WINDOW:
        assert tiers[-1] >= most


def test_a_profile_with_dips_prices_every_count_as_what_it_is_padded_to():
    def seconds(point):
        if point.kind != "verify":
            return 0.001 * point.requests
        at = point.tokens - 1
        base = SMOLLM2[at] if at < WINDOW else 136 + 3 * (at + 1 - WINDOW) + 8 * (at % 4 == 2)
        return base / 1e3

    limits = {"max_requests": 8, "max_depth": 5, "contexts": (64, 512), "max_kv_tokens": 10_000}
    samples = [
        Sample(p.kind, p.requests, p.tokens, p.kv_tokens, seconds(p))
        for p in profile_grid(**limits, padding=True)
        for _ in range(2)
    ]
    table = fit_table(samples, padding=True)
    assert table.tiers == counts_to_pad_to(SMOLLM2, 48)
    model = CostModel(table)
    times = model.step_time(1, 0, np.arange(1, 17), 64)
    assert (np.diff(times) >= 0).all()
    for count in range(1, 17):
        cheapest = min(SMOLLM2[count - 1 :]) / 1e3
        assert times[count - 1] == pytest.approx(cheapest, rel=2 * GAIN)
    assert [model.tier(n) for n in (1, 2, 3, 7, 11, 19, 500)] == [1, 4, 4, 8, 12, 20, None]
    plain = fit_table(samples)
    assert plain.tiers is None and CostModel(plain).tier(3) is None
