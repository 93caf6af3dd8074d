"""How a profile measures: in an order by which a machine that is slow for a while makes no token count look dear, and
what SGLang would run."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.cost import profile_grid
from sglang_dspark.engine import profile
from sglang_dspark.engine.profile import LONG, REPEATS, measure, run_draft, run_extend

COUNTS = range(1, 17)


def seconds(point):
    return {"verify": 0.1 + 0.004 * point.tokens, "draft": 0.005 * point.depth, "extend": 0.01}[point.kind]


@dataclasses.dataclass
class Clock:
    """A machine that takes half as long again in [slow, slow + 3) seconds."""

    slow: float
    now: float = 0.0

    def perf_counter(self):
        return self.now

    def run(self, point):
        self.now += seconds(point) * (1.5 if self.slow <= self.now < self.slow + 3 else 1.0)


def samples_of(monkeypatch, slow=1e9, limit=60.0, says=lambda mine: mine):
    clock = Clock(slow)
    monkeypatch.setattr(profile, "time", clock)
    worker = SimpleNamespace(device="cpu", agreement=SimpleNamespace(first_says=says))
    grid = profile_grid(max_requests=32, max_depth=5, contexts=(64, 2048), max_kv_tokens=10**6, padding=True)
    runs = {kind: lambda _, point: lambda: clock.run(point) for kind in ("verify", "draft", "extend")}
    return measure(worker, grid, runs, 0.0, limit), clock


@pytest.mark.parametrize("slow", range(0, 10))
def test_three_slow_seconds_leave_the_lower_of_each_small_counts_repeats_right(monkeypatch, slow):
    samples, _ = samples_of(monkeypatch, slow)
    for tokens in COUNTS:
        best = min(s.seconds for s in samples if s.kind == "verify" and s.tokens == tokens)
        assert best == pytest.approx(0.1 + 0.004 * tokens), tokens


def test_each_point_is_measured_as_often_as_is_worth_it(monkeypatch):
    samples, _ = samples_of(monkeypatch)
    times = {}
    for sample in samples:
        times.setdefault(sample[:4], []).append(sample.seconds)
    assert all(len(found) == (1 if found[0] > LONG else REPEATS) for found in times.values())


def test_it_ends_at_the_limit_with_the_most_telling_points(monkeypatch):
    samples, clock = samples_of(monkeypatch, limit=2.0)
    assert 2.0 < clock.now < 4.0  # the point that was begun is measured to its end
    assert {"verify", "draft", "extend"} == {sample.kind for sample in samples}


def test_ranks_measure_the_same_points(monkeypatch):
    """What the first rank says of a point is what this one does, whatever its own clock shows."""
    said, heard = [], []
    first, _ = samples_of(monkeypatch, says=lambda mine: said.append(mine) or mine)
    other, _ = samples_of(monkeypatch, slow=0, limit=1e9, says=lambda mine: heard.append(mine) or said[len(heard) - 1])
    assert [s[:4] for s in other] == [s[:4] for s in first] and len(said) == len(heard)


@pytest.mark.parametrize("part", ("draft", "extend"))
@pytest.mark.parametrize("graph, fits", ((False, False), (True, False), (True, True)))
def test_a_draft_is_timed_as_it_is_served_in_a_graph_where_there_is_one(part, graph, fits):
    ran = []
    graphs = SimpleNamespace(
        can_run_graph=lambda batch: fits,
        execute=lambda batch, *index: ran.append(("graph", *map(torch.Tensor.tolist, index))),
    )
    backend = SimpleNamespace(init_forward_metadata=lambda batch: ran.append("metadata"))
    draft = SimpleNamespace(
        contexts=nullcontext,
        cuda_graph_runner=graphs if graph and part == "draft" else None,
        cuda_graph_runner_for_draft_extend=graphs if graph and part == "extend" else None,
        draft_attn_backend=backend,
        draft_forward=lambda batch: ran.append("eager"),
        draft_runner=SimpleNamespace(attn_backend=backend, forward=lambda batch: ran.append("eager")),
    )
    batch = SimpleNamespace(batch_size=3, seq_lens=torch.ones(3), mark_forward_metadata_ready=lambda: None)
    run_draft(draft, batch, 2) if part == "draft" else run_extend(draft, batch, 4)
    replayed = [("graph",)] if part == "draft" else [("graph", [0, 4, 8])]
    assert ran == (replayed if graph and fits else ["metadata", "eager"])
