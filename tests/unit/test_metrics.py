"""What the metrics count, under the labels given."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from sglang_dspark.observe.metrics import COUNTERS, GAUGES, SPLIT, StepMetrics

ONE, ALIVE = np.array([1]), np.array([True])


def read(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"dspark:{name}", {"model_name": "m", "tp_rank": "0", **labels}) or 0.0


def metrics() -> tuple[StepMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    return StepMetrics({"model_name": "m", "tp_rank": 0}, gamma=3, registry=registry), registry


def test_a_step_is_counted_once_and_its_requests_each():
    it, registry = metrics()
    verified, accepted = np.array([3, 1, 0, 2]), np.array([2, 1, 0, 0])
    confidence = np.array([[0.9, 0.8, 0.7], [0.5, 0.0, 0.0], [0.4, 0.0, 0.0], [0.2, 0.1, np.nan]])
    it.settled(3, verified, accepted, confidence, np.ones(4, bool), tokens=10, tau=6.5)
    counted = {
        name: read(registry, f"{name}_total")
        for name in ("steps", "request_steps", "drafted", "verified", "accepted", "target_tokens", "tokens_produced")
    }
    assert counted == {
        "steps": 1, "request_steps": 4, "drafted": 12, "verified": 6, "accepted": 3, "target_tokens": 10,
        "tokens_produced": 7,
    }  # fmt: skip
    lengths = [read(registry, "accepted_length_total", length=str(n)) for n in (1, 2, 3, 4)]
    assert lengths == [2, 1, 1, 0]
    # Position 1 is reached by three requests, 2 and 3 only by the one that accepted what came before.
    assert [read(registry, "confidence_reached_total", position=str(k)) for k in (1, 2, 3)] == [3, 1, 1]
    assert [read(registry, "confidence_accepted_total", position=str(k)) for k in (1, 2, 3)] == [2, 1, 0]
    predicted = [round(read(registry, "confidence_predicted_total", position=str(k)), 6) for k in (1, 2, 3)]
    assert predicted == [1.6, 0.8, 0.7]


def test_a_request_that_had_ended_is_part_of_the_work_and_of_no_text():
    it, registry = metrics()
    rows = (np.array([3, 2]), np.array([2, 1]), np.full((2, 3), 0.5), np.array([True, False]))
    it.settled(3, *rows, tokens=7, tau=4.0)
    names = ("request_steps", "tokens_produced", "verified", "accepted", "target_tokens", "tau_realised")
    assert [read(registry, f"{name}_total") for name in names] == [1, 3, 5, 3, 7, 5]
    assert [read(registry, "accepted_length_total", length=str(n)) for n in (1, 2, 3)] == [0, 0, 1]
    assert [read(registry, "confidence_reached_total", position=str(k)) for k in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize(("odd", "counts"), [(np.nan, 0), (-1.0, 0), (-np.inf, 0), (2.0, 1), (np.inf, 1), (1e300, 1)])
def test_a_confidence_that_is_none_counts_as_the_nearest_probability(odd, counts):
    it, registry = metrics()
    for _ in range(2):
        it.settled(1, ONE, ONE, np.array([[odd]]), ALIVE, tokens=2, tau=1.5)
    assert read(registry, "confidence_predicted_total", position="1") == 2 * counts
    assert read(registry, "confidence_accepted_total", position="1") == 2


def test_a_step_without_a_plan_says_nothing_of_tau():
    it, registry = metrics()
    it.settled(1, ONE, ONE, np.array([[np.nan]]), ALIVE, tokens=2, tau=float("nan"))
    assert read(registry, "tau_predicted_total") == 0 and read(registry, "tau_realised_total") == 0
    assert read(registry, "confidence_reached_total", position="1") == 1
    it.settled(1, ONE, 0 * ONE, np.array([[0.5]]), ALIVE, tokens=2, tau=1.5)
    assert read(registry, "tau_predicted_total") == 1.5 and read(registry, "tau_realised_total") == 1


def test_plans_times_and_faults():
    it, registry = metrics()
    it.planned("scheduled", 3, 7, resting=False, seconds=0.001)
    it.planned("no_draft", 0, 0, resting=True, seconds=0.002)
    assert read(registry, "mode_total", mode="scheduled") == 1 and read(registry, "depth_steps_total", depth="0") == 1
    assert (read(registry, "depth"), read(registry, "budget"), read(registry, "rest_steps_total")) == (0, 0, 1)
    assert round(read(registry, "planner_seconds_total"), 6) == 0.003
    it.timed(0.01, 0.012)
    it.fault("plan")
    it.switched("no_draft", "time")
    assert read(registry, "guard_switches_total", switch="no_draft:time") == 1
    assert read(registry, "step_seconds_realised_total") == 0.012
    assert read(registry, "faults_total", part="plan") == 1


def test_an_empty_step_counts_nothing_but_itself():
    it, registry = metrics()
    none = np.zeros(0, int)
    it.settled(0, none, none, np.zeros((0, 3)), np.zeros(0, bool), tokens=0, tau=0.0)
    assert read(registry, "steps_total") == 1 and read(registry, "request_steps_total") == 0


def test_the_dashboard_shows_metrics_that_there_are():
    dashboard = (Path(__file__).parents[2] / "examples/grafana/dashboard.json").read_text()
    shown = set(re.findall(r"dspark:(\w+)", dashboard))
    assert shown == {f"{name}_total" for name in (*COUNTERS, *SPLIT)} | set(GAUGES)
    json.loads(dashboard)
