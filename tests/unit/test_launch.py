"""Servers that tests and benchmarks start: their ports, and how they are emptied."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from benchmarks import launch


def test_ports_are_not_those_of_outgoing_connections():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not set(launch.PORTS) & set(range(first, last + 1))
    assert launch.free_port() in launch.PORTS


def test_a_port_that_is_taken_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        free = launch.free_port()
        taken.bind(("127.0.0.1", launch.free_port()))
        monkeypatch.setattr(launch, "PORTS", (taken.getsockname()[1], free))
        assert {launch.free_port() for _ in range(20)} == {free}


def answering(monkeypatch, *statuses):
    """A server that answers a flush with these statuses by turn, the last one from then on, and its posts so far."""
    posts = []

    def post(url, timeout):
        posts.append(url)
        reply = requests.Response()
        reply.status_code = statuses[min(len(posts), len(statuses)) - 1]
        return reply

    monkeypatch.setattr(launch.requests, "post", post)
    return SimpleNamespace(url="http://here"), posts


def test_a_flush_waits_for_what_still_runs(monkeypatch):
    server, posts = answering(monkeypatch, 400, 400, 200)
    launch.Server.flush(server)
    assert len(posts) == 3


@pytest.mark.parametrize("status, patience", ((500, 30.0), (400, 0.0)))
def test_a_flush_that_fails_is_an_error(monkeypatch, status, patience):
    server, _ = answering(monkeypatch, status)
    with pytest.raises(requests.HTTPError):
        launch.Server.flush(server, patience)
