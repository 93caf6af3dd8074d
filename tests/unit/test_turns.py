"""Servers of a benchmark that take turns: one at a time, all to the end, on clocks that stand still with them."""

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from benchmarks import turns


class Player:
    """Stands in for a server: may work or not, and does a unit of work in 10 ms."""

    def __init__(self, log):
        self.going, self.log, self.most = threading.Event(), log, 0
        self.going.set()

    def pause(self):
        self.going.clear()
        self.log.append((self, "pause"))

    def resume(self):
        self.going.set()
        self.log.append((self, "resume"))

    def work(self, units):
        for _ in range(units):
            assert self.going.wait(30)
            self.most = max(self.most, sum(player.going.is_set() for player in {player for player, _ in self.log}))
            time.sleep(0.01)
        return units


def test_one_plays_at_a_time_and_all_come_to_their_end():
    log = []
    long, short = players = [Player(log), Player(log)]
    units = {long: 40, short: 4}
    assert turns.take_turns(players, lambda player: player.work(units[player]), seconds=0.1) == [40, 4]
    assert long.most == short.most == 1
    rounds = [player for player, what in log[2:-2] if what == "resume"]
    assert rounds[:2] == [long, short] and rounds.count(short) < rounds.count(long)
    assert all(player.going.is_set() for player in players)  # as they were before


def test_a_fault_in_one_players_work_ends_the_game_with_it():
    def work(player):
        player.work(2)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        turns.take_turns([Player([])], work, seconds=0.1)


def test_a_pause_waits_for_the_step_stops_the_scheduler_and_its_clock(monkeypatch):
    scheduler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    asked = []

    class Server:
        url, process = "http://here", None

        def info(self):
            asked.append("info")

    try:
        monkeypatch.setattr(turns, "schedulers", lambda server: [psutil.Process(scheduler.pid)])
        monkeypatch.setattr(
            turns.requests,
            "post",
            lambda url, **_: asked.append(url) or type("Reply", (), {"raise_for_status": lambda self: None})(),
        )
        player = turns.Player(Server())
        player.pause()
        assert asked == ["http://here/pause_generation", "info"]
        assert stopped(scheduler)
        stood = player.seconds()
        time.sleep(0.02)
        assert player.seconds() == stood
        player.resume()
        assert asked[2:] == ["http://here/continue_generation"]
        assert not stopped(scheduler)
        time.sleep(0.02)
        assert stood < player.seconds() < stood + 10
    finally:
        scheduler.send_signal(signal.SIGKILL)
        scheduler.wait()


def stopped(process):
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
