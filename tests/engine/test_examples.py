"""The example programs run as a user would run them, against a DSPARK server."""

import os
import subprocess
import sys

import pytest

from tests.engine.conftest import dspark


@pytest.fixture(scope="module")
def server(pairs):
    with dspark(pairs.target, pairs.eagle3) as it:
        yield it


@pytest.mark.parametrize("program", ("examples.openai_client", "examples.frontend"))
def test_an_example_program_runs_on_a_dspark_server(server, program):
    before = server.info()["dspark"].get("steps", 0)
    done = subprocess.run(
        [sys.executable, "-m", program, "--url", server.url],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert server.info()["dspark"]["steps"] > before
