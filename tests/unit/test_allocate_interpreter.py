"""The Triton kernels compute what the reference computes: Triton's interpreter, so no GPU is needed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def interpret(kernel: str, cases: int, width: str) -> int:
    """Cases found equal, in a process of its own."""
    command = [sys.executable, "-m", "tests.unit.interpret_allocate", kernel, str(cases), width]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"(\d+) cases equal", done.stdout)
    assert found is not None, done.stdout
    return int(found[1])


@pytest.mark.parametrize("kernel", ["registers", "scratch"])
def test_the_kernel_equals_the_reference(kernel: str):
    assert interpret(kernel, 10, "narrow") > 25


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["registers", "scratch"])
def test_the_kernel_equals_the_reference_on_many_cases_and_up_to_4096_requests(kernel: str):
    assert interpret(kernel, 400, "wide") > 600
