"""A request's own figures, from the lengths that were sent to the target."""

import pytest

from sglang_dspark.engine.request_info import add_verified


@pytest.mark.parametrize(
    ("sent", "correct", "verified", "rate"),
    [
        ([0, 3, 0, 2], 3, 4, 0.75),  # three steps of the anchor alone, two of two drafts
        ([0, 5], 0, 0, None),
        ([0, 0, 0, 0, 1], 3, 3, 1.0),
    ],
)
def test_drafts_are_counted_by_what_the_target_saw(sent, correct, verified, rate):
    meta = {"spec_cap_lens_histogram": sent, "spec_num_correct_drafts": correct}
    add_verified(meta)
    assert meta["spec_num_verified_drafts"] == verified
    assert meta.get("spec_verified_accept_rate") == rate


@pytest.mark.parametrize("meta", ({}, {"spec_cap_lens_histogram": []}, {"spec_cap_lens_histogram": None}))
def test_without_lengths_nothing_is_added(meta):
    before = dict(meta)
    add_verified(meta)
    assert meta == before
