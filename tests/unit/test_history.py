"""Confidence history: lag, and that no request ever sees another's past."""

import numpy as np
import pytest

from sglang_dspark.schedule import ConfidenceHistory

GAMMA = 3
PRIOR = np.array([0.5, 0.4, 0.3], np.float32)


def rows(*values: float) -> np.ndarray:
    return np.repeat(np.array(values, np.float32)[:, None], GAMMA, axis=1)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_the_mean_of_the_newest_rows_that_are_old_enough_is_returned(lag: int):
    history = ConfidenceHistory(4, GAMMA, lag)
    for step in range(20):
        history.record(step, ids(2), ids(1), rows(step / 100))
        confidence, remap = history.lookup(step, ids(2), ids(1), PRIOR)
        if step < lag:
            assert remap[0] == -1 and np.array_equal(confidence[0], PRIOR)
        elif step == lag:
            assert remap[0] == 0 and np.allclose(confidence[0], PRIOR / 2)
        else:
            assert remap[0] == 0 and np.allclose(confidence, (step - lag - 0.5) / 100)


def test_a_request_that_sat_out_steps_keeps_its_last_rows():
    history = ConfidenceHistory(4, GAMMA, lag=2)
    for step, value in ((1, 0.1), (2, 0.3), (40, 0.8), (41, 0.9)):
        history.record(step, ids(0), ids(1), rows(value))
    confidence, remap = history.lookup(41, ids(0), ids(1), PRIOR)
    assert remap[0] == 0 and np.allclose(confidence, 0.2)  # steps 40 and 41 are too new, and overwrote neither


def test_a_reused_slot_gives_the_prior_and_not_the_former_requests_past():
    history = ConfidenceHistory(4, GAMMA)
    for step in (1, 2):
        history.record(step, ids(0, 1), ids(7, 8), rows(0.1, 0.2))
    confidence, remap = history.lookup(5, ids(0, 1, 3), ids(7, 9, 1), PRIOR)
    assert remap.tolist() == [0, -1, -1]
    assert np.allclose(confidence, np.stack([rows(0.1)[0], PRIOR, PRIOR]))


def test_the_prior_may_differ_between_requests():
    history = ConfidenceHistory(4, GAMMA)
    confidence, _ = history.lookup(1, ids(0, 1), ids(1, 1), rows(0.6, 0.7))
    assert np.allclose(confidence, rows(0.6, 0.7))


def test_recording_a_step_again_replaces_it():
    history = ConfidenceHistory(2, GAMMA, lag=1)
    history.record(1, ids(0), ids(1), rows(0.1))
    history.record(2, ids(0), ids(1), rows(0.2))
    history.record(2, ids(0), ids(1), rows(0.3))
    assert np.allclose(history.lookup(2, ids(0), ids(1), PRIOR)[0], (PRIOR + np.float32(0.1)) / 2)
    assert np.allclose(history.lookup(3, ids(0), ids(1), PRIOR)[0], 0.2)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_every_row_returned_was_recorded_by_that_request_long_enough_ago(lag: int):
    rng, slots = np.random.default_rng(lag), 4
    history = ConfidenceHistory(slots, 1, lag)
    generation = np.ones(slots, np.int64)
    log: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for step in range(400):
        generation += rng.random(slots) < 0.1  # the slot went to another request
        active = np.flatnonzero(rng.random(slots) < 0.6)
        confidence, remap = history.lookup(step, active, generation[active], np.array([-1.0], np.float32))
        for row, slot in enumerate(active):
            old = [value for when, value in log.get((slot, generation[slot]), []) if when <= step - lag]
            assert remap[row] == (row if old else -1)
            two = [*old[:-3:-1], -1.0, -1.0][:2]
            assert confidence[row, 0] == np.float32(np.float32(two[0]) + np.float32(two[1])) / 2
        values = rng.random(len(active)).astype(np.float32)
        history.record(step, active, generation[active], values[:, None])
        for slot, value in zip(active, values, strict=True):
            log.setdefault((slot, generation[slot]), []).append((step, value))


def test_a_negative_lag_is_refused():
    with pytest.raises(ValueError, match="not -1"):
        ConfidenceHistory(1, 1, -1)
