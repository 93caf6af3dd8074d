"""Stairs and padding without graphs: what is measured is never made slower, and a pattern must have been seen twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.cost import CostModel, Sample, fit_table, profile_grid
from sglang_dspark.cost.padding import GAIN, PERIOD, ROOM, WINDOW, find_padding

# ms of 1, 2, ... 16 tokens of SmolLM2-135M on one CPU core in float32, as a profile measured them.
SMOLLM2 = [66, 98, 119, 86, 97, 99, 109, 104, 118, 116, 128, 118, 135, 127, 144, 136]


def test_a_count_dearer_than_the_end_of_its_stair_is_padded_and_the_pattern_goes_on():
    found = find_padding(SMOLLM2, 32)
    assert found.tiers == (1, 4, 6, 8, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36)
    assert found.padded == (2, 3, 7, 11, 13, 15, 19, 23, 27, 31, 35)


@pytest.mark.parametrize(
    "seconds",
    ([1.0] * 16, list(range(1, 17)), [1 + 0.005 * (i % 2) for i in range(16)], [1.0], [2.0, 3.0]),
    ids=("flat", "rising", "noise", "one", "two"),
)
def test_without_dips_nothing_is_padded(seconds):
    assert find_padding(seconds, 64) is None


def test_a_dip_that_does_not_come_back_is_no_pattern():
    seconds = [1.0 + 0.1 * i for i in range(16)]
    seconds[11] = seconds[8]  # 12 tokens cost what 9 do: a block of 12, not of 4
    found = find_padding(seconds, 48)
    assert set(found.padded) == {10, 11}
    assert set(range(13, 49)) <= set(found.tiers)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=WINDOW), st.integers(1, 200))
def test_padding_saves_what_it_promises_and_goes_never_far(seconds, most):
    found = find_padding(seconds, most)
    if found is None:
        return
    for counts in found:
        assert list(counts) == sorted(set(counts)) and counts[0] >= 1
    assert not set(found.tiers) & set(found.padded)
    for count in range(1, found.tiers[-1] + 1):
        tier = min(t for t in found.tiers if t >= count)
        assert tier - count < PERIOD
        if tier <= len(seconds):
            assert (seconds[tier - 1] < (1 - GAIN) * seconds[count - 1]) == (count in found.padded)
            assert seconds[tier - 1] <= (1 + ROOM) * seconds[count - 1]
    if len(seconds) == WINDOW:
        assert found.tiers[-1] >= most


def test_a_profile_with_dips_prices_every_count_as_the_end_of_its_stair():
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
    assert (table.tiers, table.padded) == find_padding(SMOLLM2, 48)
    model = CostModel(table)
    times = model.step_time(1, 0, np.arange(1, 17), 64)
    assert (np.diff(times) >= 0).all()
    for count in range(1, 17):
        assert times[count - 1] == pytest.approx(SMOLLM2[min(t for t in table.tiers if t >= count) - 1] / 1e3, rel=0.01)
    assert [model.padded(n) for n in (1, 2, 3, 4, 5, 7, 11, 19, 500)] == [None, 4, 4, None, None, 8, 12, 20, None]
    plain = fit_table(samples)
    assert plain.tiers is None and plain.padded is None and CostModel(plain).padded(3) is None
