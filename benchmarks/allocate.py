"""Time of an allocation against SGLang's: on a GPU its three-launch kernel, elsewhere its torch reference.

    python -m benchmarks.allocate

Both split the same budget over the same confidence, ten batches in turn; SGLang 0.5.23 is schedule_verify_lens_topk of
kernels/ops/speculative/dspark. Results are compared first, on confidence that keeps clear of where they differ: SGLang
refuses survivals below 1e-6 and may round a product in another order. Ours also gives the prefix sum.
"""

import json
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.timing import CALLS, make_sglang_importable, medians, on_each
from sglang_dspark.kernels import allocate

CASES = ((8, 5), (64, 7), (256, 7), (1024, 7))


def case(requests: int, gamma: int, device: str, compare: bool = True) -> dict[str, float]:
    """Medians of one shape, on a GPU also of the host's part in a launch; compare: SGLang's too, where it is there."""
    generator = torch.Generator().manual_seed(requests)
    batches = [(1 - 0.5 * torch.rand(requests, gamma, generator=generator)).to(device) for _ in range(CALLS)]
    remap, prior = torch.arange(requests, device=device), torch.full((gamma,), 0.8, device=device)
    budget = 2 * requests
    given = budget if device == "cpu" else torch.tensor(budget, dtype=torch.int32, device=device)

    def ours(confidence: torch.Tensor) -> torch.Tensor:
        return allocate(confidence, remap, prior, given).verify_lens

    calls = {"ours": ours}
    if compare:
        calls = {"sglang": sglangs(budget, gamma), **calls}
        for _ in range(CALLS):
            # Multiples of 1/16 above a half: products of up to six of them are exact, and none chosen is below 1e-6.
            exact = (torch.randint(9, 17, (requests, gamma), generator=generator) / 16).to(device)
            same = torch.equal(calls["sglang"](exact), ours(exact))
            assert same, f"results differ at {requests} x {gamma}"
    turns = {name: on_each(batches, call) for name, call in calls.items()}
    times = {f"{name}_us": time for name, time in (medians if device == "cpu" else on_stream)(turns).items()}
    if device != "cpu":
        times |= {f"{name}_host_us": time for name, time in medians(turns).items()}
    return {"requests": requests, "gamma": gamma, **{name: round(value, 1) for name, value in times.items()}}


def sglangs(budget: int, gamma: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """SGLang's own allocation of a budget."""
    from sglang.kernels.ops.speculative.dspark.dspark_schedule import ScheduleVerifyLensTopk
    from sglang.srt.speculative.dspark_components.dspark_planner import DSparkScheduleConfig

    config = DSparkScheduleConfig(gamma=gamma)
    return lambda confidence: ScheduleVerifyLensTopk.execute(confidence=confidence, budget=budget, cfg=config)


def on_stream(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of each call on the device, as the median of replays of a CUDA graph of it."""
    result = {}
    for name, call in calls.items():
        for _ in range(CALLS):
            call()  # nothing may be left to compile while the graph is captured
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(2 * CALLS):
                call()
        taken = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) / (2 * CALLS) * 1e6)
        result[name] = median(taken)
    return result


def main() -> None:
    make_sglang_importable()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"on {device}\n{'R x gamma':>10} {'SGLang us':>10} {'ours us':>10} {'ratio':>6}")
    cases = []
    for requests, gamma in CASES:
        found = case(requests, gamma, device)
        cases.append(found)
        size, ratio = f"{requests}x{gamma}", found["sglang_us"] / found["ours_us"]
        print(f"{size:>10} {found['sglang_us']:>10} {found['ours_us']:>10} {ratio:>6.1f}")
    print(json.dumps({"device": device, "cases": cases}))


if __name__ == "__main__":
    main()
