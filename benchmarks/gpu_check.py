"""Checks the allocation kernel on this machine's GPU and times it against SGLang's three launches, in under 4 minutes.

    python -m benchmarks.gpu_check

Needs pytest and a torch built for the GPU. Correctness is tests/gpu. Times are those of benchmarks.allocate: on the
device, from replays of a CUDA graph, and on the host, of a launch outside a graph; without SGLang only ours. The last
line is one JSON object. The exit status is 1 where something differs or nothing could be checked.
"""

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "gpu"
# Beyond what SGLang's DSPARK is used with; the last is past what one block holds in registers.
LARGER = ((2048, 8), (4096, 16))


def main() -> int:
    if not has_gpu():
        print("No GPU that this Python's torch can use, so nothing was checked: run it on a machine that has one.")
        return 1
    import pytest
    import torch

    from benchmarks.allocate import CASES, case

    start, device = time.perf_counter(), torch.cuda.get_device_name()
    print(f"on {device}, torch {torch.__version__}")
    correct = pytest.main(["-q", "-p", "no:cacheprovider", str(TESTS)]) == 0
    compare = find_spec("sglang") is not None
    print(f"{'R x gamma':>10} {'SGLang us':>10} {'ours us':>10} {'ratio':>6} {'SGLang host':>12} {'ours host':>10}")
    cases = []
    for requests, gamma in (*CASES, *LARGER):
        found = case(requests, gamma, "cuda", compare=compare)
        cases.append(found)
        sglang, host = found.get("sglang_us", float("nan")), found.get("sglang_host_us", float("nan"))
        ours, ours_host = found["ours_us"], found["ours_host_us"]
        print(f"{f'{requests}x{gamma}':>10} {sglang:>10} {ours:>10} {sglang / ours:>6.1f} {host:>12} {ours_host:>10}")
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"device": device, "correct": correct, "seconds": seconds, "cases": cases}))
    return 0 if correct else 1


def has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
