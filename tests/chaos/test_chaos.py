"""The chaos program on a few hundred requests; `make chaos` sends ten thousand."""

import pytest

from tests.chaos.__main__ import complaints, run


@pytest.mark.long
def test_hundreds_of_requests_of_every_kind_survive_a_scheduler_that_fails():
    assert list(complaints(run(requests=300, seed=2))) == []


def test_each_way_of_going_wrong_is_complained_of():
    fine = {
        "requests": 3, "answered": 1, "aborted": 1, "disconnected": 1, "wrong": 0, "lost": 0, "drained": True,
        "kv_leaked": 0, "requests_leaked": 0, "retractions": 1,
        "faults_planted": {"plan": 1}, "faults_counted": {"plan": 1},
    }  # fmt: skip
    assert list(complaints(fine)) == []
    worse = {"drained": False, "faults_counted": {}, "retractions": 0, "faults_planted": {}}
    for name in fine:
        assert len(list(complaints({**fine, name: worse.get(name, 0 if fine[name] else 1)}))) >= 1, name
