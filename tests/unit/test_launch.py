"""Servers that tests and benchmarks start do not lose their port to somebody's outgoing connection."""

import socket
from pathlib import Path

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
