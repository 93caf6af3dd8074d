"""Starts a real SGLang server on this machine's CPU, waits for it, talks to it and takes it down.

Used by the demo, the benchmarks and the engine tests, so that all of them measure and test the same thing: the command
a user would type.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests

READY_SECONDS = 420  # 12 s on an idle machine; a busy two-core CI machine has taken minutes

PORTS = range(20000, 30000)

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Huge pages. Without them servers started alike differ by 14% for as long as they live, by where their weights
    # happen to lie, and all are 8% slower.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "TORCHDYNAMO_DISABLE": "1",  # or the first EAGLE3 request compiles for 24 s
}
CPU_FLAGS = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--disable-cuda-graph",
    "--mem-fraction-static",
    "0.5",
    "--skip-server-warmup",
    "--sleep-on-idle",  # an idle scheduler polls, and takes a core from whatever is measured beside it
    "--log-level",
    "info",
    "--prefill-attention-backend",
    "intel_amx",
    "--decode-attention-backend",
    "intel_amx",
]


def free_port() -> int:
    """A port that nothing listens on, below those that the system gives to outgoing connections.

    A server binds its port half a minute after it was chosen, and one of those may be another client's by then.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"No port from {PORTS[0]} to {PORTS[-1]} is free; end some servers.")


def _die_with_parent() -> None:
    """In the child: end when this process does, however it ends; a server left over would spoil every later timing."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


class Server:
    """``python -m sglang.launch_server`` on a free local port; a context manager.

    args: what goes behind flags. env: added to the environment. threads: OMP_NUM_THREADS; unset, a busy neighbour
    costs a CPU engine 20-fold.
    """

    def __init__(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        threads: int | None = None,
        flags: Sequence[str] = CPU_FLAGS,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
        command = [sys.executable, "-m", "sglang.launch_server", *flags, "--port", str(self.port), *args]
        environment = {**os.environ, **CPU_ENVIRONMENT, **(env or {})}
        environment.setdefault("OMP_NUM_THREADS", str(threads or os.cpu_count() or 1))
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def __enter__(self) -> Server:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Block until the server answers.

        Raises:
            RuntimeError: it died or took too long; the message ends with the end of its log.
        """
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"The server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"The server was not ready after {READY_SECONDS} s:\n{self.tail()}")

    def tail(self, characters: int = 4000) -> str:
        """The end of the server's log."""
        return self.log.read_text(errors="replace")[-characters:]

    def generate(self, prompt: str | list[int], timeout: float = 600, **sampling: Any) -> dict[str, Any]:
        """One /generate request; ``prompt`` is a text or token ids, ``sampling`` SGLang's sampling parameters."""
        field = "text" if isinstance(prompt, str) else "input_ids"
        extra = {k: sampling.pop(k) for k in ("return_logprob", "top_logprobs_num") if k in sampling}
        body = {field: prompt, "sampling_params": sampling, **extra}
        reply = requests.post(f"{self.url}/generate", json=body, timeout=timeout)
        if reply.status_code != 200:
            raise RuntimeError(f"/generate answered {reply.status_code}: {reply.text[:500]}\n{self.tail()}")
        return reply.json()

    def generate_all(self, prompts: list[Any], users: int | None = None, **sampling: Any) -> list[dict[str, Any]]:
        """All prompts at once, or ``users`` at a time; answers in order."""
        with ThreadPoolExecutor(users or len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **sampling), prompts))

    def info(self) -> dict[str, Any]:
        """SGLang's internal state of the first scheduler; ours is under ``dspark``."""
        return requests.get(f"{self.url}/server_info", timeout=60).json()["internal_states"][0]

    def flush(self, patience: float = 30.0) -> None:
        """Empty the radix cache, so that runs with the same prompts compare.

        SGLang refuses while a request runs, and for a moment after the last answer; that is waited for.
        """
        deadline = time.monotonic() + patience
        while True:
            reply = requests.post(f"{self.url}/flush_cache", timeout=60)
            if reply.status_code != 400 or time.monotonic() > deadline:
                return reply.raise_for_status()
            time.sleep(0.1)

    def close(self) -> None:
        """End the server and all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
