"""Fixtures of the engine tests: real SGLang servers on tiny models, and what plain decoding says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from benchmarks.launch import CPU_FLAGS, Server
from tests import tiny
from tests.tiny import TinyPairs

NEW_TOKENS = 40


@pytest.fixture(scope="session")
def pairs() -> TinyPairs:
    return tiny.build()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return make_prompts()


def make_prompts() -> list[list[int]]:
    """16 token prompts of 1 to 90 tokens; four share a prefix of 40, four another that ends inside a page of 16."""
    random = Random(1)

    def ids(count: int) -> list[int]:
        return [random.randrange(20, 80) for _ in range(count)]

    long, short = ids(40), ids(21)
    return [
        *[long + ids(k) for k in (1, 3, 20, 50)],
        *[short + ids(k) for k in (1, 2, 11, 30)],
        *[ids(k) for k in (1, 2, 5, 15, 16, 17, 33, 64)],
    ]


class Switch:
    """A server whose verify policy a test can switch while it runs (tests.engine.policies.Switch)."""

    def __init__(self, server: Server, file: Path) -> None:
        self.server, self.file = server, file

    def to(self, policy: str) -> Server:
        self.file.write_text(policy)
        return self.server

    def __enter__(self) -> Switch:
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


def switched(
    folder: Path, target: Path, draft: Path | None, *args: str, policy: str = "own", env: dict[str, str] | None = None
) -> Switch:
    """A DSPARK server under the Switch policy that is starting up. folder: where the policy is written."""
    file = folder / "policy"
    file.write_text(policy)
    env = {"DSPARK_POLICY": "tests.engine.policies:Switch", "TEST_POLICY_FILE": str(file), **(env or {})}
    return Switch(dspark(target, draft, *args, env=env), file)


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Callable[..., Switch]]:
    """Starts a DSPARK server under the Switch policy; it ends with the test."""
    with ExitStack() as running:
        yield lambda target, draft, *args: running.enter_context(switched(tmp_path, target, draft, *args))


def dspark(target: Path, draft: Path | None, *args: str, env: dict[str, str] | None = None) -> Server:
    """A DSPARK server that is starting up."""
    given = ["--speculative-draft-model-path", str(draft)] if draft else []
    return Server(
        *base(target),
        "--speculative-algorithm",
        "DSPARK",
        *given,
        *args,
        env={"DSPARK_PROFILE_SECONDS": "2", **(env or {})},
    )


def base(target: Path) -> list[str]:
    """Model and a KV pool of 8,192 tokens, enough for 16 requests with room for 48 to wait."""
    return ["--model-path", str(target), "--max-total-tokens", "8192", "--max-running-requests", "16"]


@pytest.fixture(scope="session")
def plain(pairs: TinyPairs) -> Iterator[Server]:
    """The same target without speculation. Under overlap scheduling SGLang's penalties would lag by a token."""
    with Server(*base(pairs.target), "--disable-overlap-schedule", "--enable-custom-logit-processor") as server:
        yield server


@pytest.fixture(scope="session")
def expected(plain: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy output of plain decoding, per prompt."""
    return greedy(plain, prompts)


def greedy(server: Server, prompts: list[list[int]], users: int | None = None) -> list[list[int]]:
    """Greedy output tokens of each prompt, never ending early."""
    replies = server.generate_all(prompts, users, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [reply["output_ids"] for reply in replies]


def free(server: Server) -> tuple[int, int]:
    """Free KV slots (target and draft share them) and request slots, once all is idle and the radix cache is empty."""
    server.flush()
    pool = server.info()["dspark"]["pools"]
    return pool["kv_free"], pool["requests_free"]


@pytest.fixture(scope="session")
def resolve(pairs):
    """Resolves server arguments in this process, as a server does before it loads anything."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()

    def run(*args, draft=pairs.eagle3, target=pairs.target):
        given = ["--speculative-draft-model-path", str(draft)] if draft else []
        argv = ["--model-path", str(target), "--speculative-algorithm", "DSPARK", *given, *CPU_FLAGS, *args]
        server_args = prepare_server_args(argv)
        server_args.resolve_once()
        return server_args

    return run


def refusal(action):
    """The sentence that ``action`` is refused with: one line, one full stop at its end."""
    with pytest.raises(ValueError) as caught:
        action()
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence
