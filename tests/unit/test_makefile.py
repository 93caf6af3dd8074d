"""Every command of ours that the Makefile runs is one that its module accepts."""

import importlib
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
THEIRS = ("venv", "pip", "pytest")


def commands():
    """(module, arguments) of every `python -m` that any target runs, its prerequisites rebuilt."""
    dry = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo", "test", "test-all", "bench", "bench-serving", "PROMPTS=p.jsonl"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for line in dry.splitlines():
        words = shlex.split(line)
        if "-m" in words[1:2]:
            yield words[2], words[3:]


def test_the_makefile_gives_each_module_arguments_that_it_takes():
    ours = {module: arguments for module, arguments in commands() if module not in THEIRS}
    assert {"examples.demo", "examples.smollm2.convert", "benchmarks.plan"} <= set(ours)
    for name, arguments in ours.items():
        module = importlib.import_module(name)
        if arguments:
            module.build_parser().parse_args(arguments)  # exits where it does not take them
