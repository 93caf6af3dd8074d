"""Every command of ours that the Makefile runs is one that its module accepts."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("demo", "test", "test-all", "test-conditions", "chaos", "bench", "bench-serving")
THEIRS = ("venv", "pip", "pytest")


def commands():
    """(module, arguments) of every `python -m` that any target runs, its prerequisites rebuilt."""
    dry = subprocess.run(
        ["make", "--dry-run", "--always-make", *TARGETS, "PROMPTS=p.jsonl"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for line in dry.splitlines():
        words = shlex.split(line)
        if "-m" in words[1:2]:
            yield words[2], words[3:]


def test_the_makefile_gives_each_module_arguments_that_it_takes():
    ours = {module: arguments for module, arguments in commands() if module not in THEIRS}
    assert {"examples.demo", "examples.smollm2.convert", "benchmarks.plan", "tests.chaos"} <= set(ours)
    for name, arguments in ours.items():
        module = importlib.import_module(name)
        if arguments:
            module.build_parser().parse_args(arguments)  # exits where it does not take them


@pytest.mark.parametrize("module", ("benchmarks.plan", "benchmarks.allocate", "benchmarks.overhead"))
def test_a_benchmark_of_the_core_finds_sglang_by_itself(module):
    """In a shell that has set nothing, as a person's has not."""
    program = (
        f"import {module} as it, benchmarks.timing as timing; timing.ROUNDS = 1; it.CASES = it.CASES[:1]; it.main()"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "TORCHDYNAMO"))}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (case,) = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert case["requests"] == 8 and case["step_us" if module.endswith("overhead") else "sglang_us"] > 0
