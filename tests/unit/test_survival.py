"""Survival: any float becomes a probability, and products never rise along a row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sglang_dspark.schedule import sanitise, survival

any_float = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
confidences = arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=any_float)


def test_sanitise_maps_what_is_no_probability_and_keeps_what_is():
    dirty = np.array([np.nan, -np.inf, -0.5, -0.0, 0.0, 1e-42, 0.5, 1.0, 1.5, np.inf], np.float32)
    clean = np.array([0, 0, 0, 0, 0, 1e-42, 0.5, 1, 1, 1], np.float32)
    assert np.array_equal(sanitise(dirty).view(np.uint32), clean.view(np.uint32))  # bits: -0.0 must not survive


@settings(max_examples=100, deadline=None)
@given(confidences)
def test_survival_multiplies_left_to_right_in_float32_and_never_rises(confidence):
    result = survival(confidence)
    for row, factors in zip(result, sanitise(confidence), strict=True):
        product = np.float32(1)
        for value, factor in zip(row, factors, strict=True):
            product = np.float32(product * factor)
            assert value == product
    assert (np.diff(result, axis=1) <= 0).all()
    assert ((result >= 0) & (result <= 1)).all()


def test_a_nan_row_costs_no_other_row_anything():
    confidence = np.full((8, 7), 0.9, np.float32)
    clean = survival(confidence)
    confidence[3] = np.nan
    dirty = survival(confidence)
    assert (dirty[3] == 0).all()
    assert np.array_equal(np.delete(dirty, 3, 0), np.delete(clean, 3, 0))


def test_the_input_is_left_alone():
    confidence = np.full((2, 3), 0.5, np.float32)
    survival(confidence)
    assert (confidence == 0.5).all()
