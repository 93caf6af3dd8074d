"""The profile command: it ends whatever the server does, with a file or with one sentence, and leaves no process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from sglang_dspark.cli import main
from sglang_dspark.commands.profile import HERE, serves
from sglang_dspark.cost import CostKey, CostTable, save_table

KEY = CostKey("target", "draft", "float32", "cpu", "intel_amx", 1, 1, 1, "0.5.23")

# Stands for sglang.launch_server: notes itself and what it was given, then does what the first flag says.
SERVER = """
import json, os, signal, socket, sys, time
what, port = sys.argv[1], int(sys.argv[sys.argv.index("--port") + 1])
here = os.path.dirname(__file__)
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(os.path.join(here, "started.tmp"), "w") as file:
    json.dump([os.getpid(), sys.argv[1:], os.environ["DSPARK_PROFILE_SECONDS"]], file)
os.replace(os.path.join(here, "started.tmp"), os.path.join(here, "started"))
if what == "ends":
    sys.exit(3)
if what in ("loads", "deaf"):
    time.sleep(600)
if what == "writes":
    time.sleep(0.5)
    os.rename(os.path.join(here, "table"), os.environ["DSPARK_COST_TABLE"])
with socket.create_server(("127.0.0.1", port)) as listening:
    while True:
        with listening.accept()[0] as asked:
            asked.recv(4096)
            asked.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
"""


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    """The folder of an SGLang that measures nothing, and is what a server of this process runs."""
    folder = tmp_path / "path" / "sglang"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "launch_server.py").write_text(SERVER)
    save_table(folder / "table", KEY, CostTable((1, 2), (0.1, 0.2)))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)
    yield folder
    if (folder / "started").exists():
        with suppress(ProcessLookupError):
            os.killpg(json.loads((folder / "started").read_text())[0], signal.SIGKILL)


def started(sglang):
    """Process, flags and seconds of the server that was started."""
    return json.loads((sglang / "started").read_text())


def runs(process):
    """Whether a process is there; one that has ended and that nobody waited for is not."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def profile(out, *flags):
    return main(["profile", "--out", str(out), "--seconds", "0.5", "--json", "--", *flags])


def test_a_server_that_writes_its_table_gives_it_and_is_ended(sglang, tmp_path, capfd):
    out = tmp_path / "new" / "cost.json"
    assert profile(out, "writes", "--speculative-algorithm=dspark", "--host", "0.0.0.0", "--port", "1") == 0
    assert json.loads(capfd.readouterr().out)["table"]["tokens"] == [1, 2]
    process, flags, seconds = started(sglang)
    assert not runs(process) and seconds == "0.5"
    assert [flags[-i] for i in (7, 6, 5, 4)] == ["--speculative-algorithm", "DSPARK", "--host", HERE]


def test_a_server_that_serves_without_a_table_ends_the_command_with_a_sentence(sglang, tmp_path, capfd):
    out = tmp_path / "cost.json"
    assert profile(out, "serves") == 1
    error = capfd.readouterr().err
    assert error.startswith("sglang-dspark profile: the server is up without") and error.count("\n") == 1
    assert str(out) in error and "--seconds 0.5" in error and error.endswith(".\n")
    assert not runs(started(sglang)[0])


def test_a_server_that_ends_first_gives_its_exit_code(sglang, tmp_path):
    assert profile(tmp_path / "cost.json", "ends") == 3


@contextmanager
def command(sglang, what):
    """The command in a process of its own, once it has started a server."""
    run = [sys.executable, "-m", "sglang_dspark.cli", "profile", "--out", str(sglang / "cost.json"), "--", what]
    # As from a terminal: what started this test may ignore signals, which children inherit.
    heeds = [partial(signal.signal, number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)]
    process = subprocess.Popen(run, stderr=subprocess.DEVNULL, preexec_fn=lambda: [heed() for heed in heeds])
    try:
        assert comes((sglang / "started").exists)
        yield process
    finally:
        process.kill()
        process.wait()


def comes(true):
    """Whether something comes true within a busy machine's half minute."""
    return any(true() or time.sleep(0.05) for _ in range(600))


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP))
def test_a_signal_to_the_command_ends_its_server_too(sglang, number):
    with command(sglang, "loads") as running:
        running.send_signal(number)
        assert running.wait(30) == 128 + number
        assert not runs(started(sglang)[0])


def test_a_second_signal_ends_a_server_that_ignores_the_first(sglang):
    with command(sglang, "deaf") as running:
        for _ in range(2):
            running.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert running.wait(10) == 128 + signal.SIGTERM
        assert comes(lambda: not runs(started(sglang)[0]))


def test_signals_do_again_what_they_did(sglang, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    profile(tmp_path / "cost.json", "ends")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(
    "flags",
    (
        ["--speculative-algorithm", "EAGLE3"],
        ["--speculative-algorithm=NGRAM"],
        ["--speculative-algo", "EAGLE"],
        ["--speculative-algorithm", "DSPARK", "--speculative-algorithm", "NONE"],
        ["--speculative-algorithm"],
        ["--speculative-algorithm="],
    ),
)
def test_another_algorithm_is_refused_before_a_server_starts(sglang, tmp_path, capfd, flags):
    assert profile(tmp_path / "cost.json", "--model-path", "x", *flags) == 1
    error = capfd.readouterr().err
    assert "--speculative-algorithm '" in error and "leave it out" in error and error.count("\n") == 1
    assert not (sglang / "started").exists()


def under_a_file(folder):
    (folder / "file").touch()
    return folder / "file" / "cost.json"


def in_a_file(folder):
    return under_a_file(folder) / "deeper" / "cost.json"


def nowhere(folder):
    return Path("/proc/cost.json")


def there(folder):
    (folder / "cost.json").touch()
    return folder / "cost.json"


def folder_itself(folder):
    return folder


@pytest.mark.parametrize("where", (under_a_file, in_a_file, nowhere, there, folder_itself), ids=lambda it: it.__name__)
def test_a_file_that_cannot_be_written_is_refused_before_a_server_starts(sglang, tmp_path, capfd, where):
    assert profile(out := where(tmp_path), "writes") == 1
    error = capfd.readouterr().err
    assert f"--out {out}" in error and "name another file" in error and error.count("\n") == 1
    assert not (sglang / "started").exists()


@pytest.mark.parametrize(
    ("answer", "listens"),
    (
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", False),
        (b"\x15\x03\x01\x00\x02\x02\x0a", True),  # an alert of TLS
        (b"", True),  # hung up
    ),
)
def test_what_a_server_answers_says_whether_it_serves(answer, listens):
    def reply():
        with server.accept()[0] as asked:
            asked.recv(4096)
            asked.sendall(answer)

    with socket.create_server((HERE, 0)) as server:
        thread = Thread(target=reply)
        thread.start()
        assert serves(server.getsockname()[1]) == listens
        thread.join()


def test_a_port_that_nothing_listens_on_does_not_serve():
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        assert not serves(bound.getsockname()[1])
