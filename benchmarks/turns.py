"""Servers that take turns on one machine: one works for some seconds while the others stand still amid their answers.

What slows the machine for longer than a turn meets all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import psutil
import requests

from benchmarks.launch import Server

T = TypeVar("T")


class Player:
    """A server that can stand still between two of its steps, and the time that it did not."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._schedulers = schedulers(server)
        self._seconds = 0.0
        self._since: float | None = time.perf_counter()

    def seconds(self) -> float:
        """A clock that stands still with the server."""
        since = self._since  # another thread's to change
        return self._seconds + (0.0 if since is None else time.perf_counter() - since)

    def pause(self) -> None:
        """Stand still, requests in place, as soon as the present step is done."""
        self._post("pause_generation", {"mode": "in_place"})
        self.server.info()  # its answer is behind that step, and behind the pause
        self._seconds, self._since = self.seconds(), None
        for process in self._schedulers:  # a paused scheduler polls
            process.suspend()

    def resume(self) -> None:
        """Go on."""
        self._since = time.perf_counter()
        for process in self._schedulers:
            process.resume()
        self._post("continue_generation", {})

    def _post(self, path: str, body: dict[str, str]) -> None:
        requests.post(f"{self.server.url}/{path}", json=body, timeout=600).raise_for_status()


def schedulers(server: Server) -> list[psutil.Process]:
    """A server's processes that run its steps."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in processes if process.name().startswith("sglang::schedul")]


def take_turns(players: list[Player], work: Callable[[Player], T], seconds: float) -> list[T]:
    """What ``work`` returns for each player, all begun at once, each player at work for ``seconds`` by turn."""
    for player in players:
        player.pause()
    with ThreadPoolExecutor(len(players)) as pool:
        futures = {player: pool.submit(work, player) for player in players}
        waiting = players
        while waiting:
            for player in waiting:
                player.resume()
                try:
                    wait([futures[player]], timeout=seconds)
                finally:
                    player.pause()
            waiting = [player for player in waiting if not futures[player].done()]
    for player in players:
        player.resume()
    return [futures[player].result() for player in players]
