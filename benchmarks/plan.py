"""Host time of a plan against SGLang's own planner: compute_verify_token_budget of 0.5.23, one process, equal inputs.

    python -m benchmarks.plan

Both start from the same survivals, already multiplied, of ten batches in turn (the same one again would let the branch
predictor learn its sort), and price tokens by the same table of tiers; SGLang looks it up by the step below, ours by
the tier above. joint_us also chooses the draft depth, which SGLang does not.
"""

import json

import numpy as np
import torch

from benchmarks.timing import CALLS, make_sglang_importable, medians, on_each
from sglang_dspark.cost import CostModel, CostTable
from sglang_dspark.schedule import budget_from_survival, joint_from_survival, survival

CASES = ((8, 5), (64, 7), (256, 7), (1024, 7))


def cost_table(requests: int, gamma: int) -> CostTable:
    """A GPU's staircase at 48 tiers: 10 ms and 2 us a token, and 0.4 ms a draft forward."""
    most = requests * (gamma + 1)
    tiers = np.unique(np.linspace(requests, most, 48).astype(int))
    return CostTable(
        tokens=tuple(map(int, tiers)),
        seconds=tuple(0.010 + 2e-6 * tiers),
        draft_fixed=0.0004,
        tiers=tuple(map(int, tiers)),
    )


def batch(rng: np.random.Generator, requests: int, gamma: int) -> np.ndarray:
    """Survivals [requests, gamma]. Requests differ in how predictable they are, positions of one request little."""
    return survival(rng.beta(4 * rng.random((requests, 1)) + 0.5, 1, (requests, gamma)).astype(np.float32))


def case(requests: int, gamma: int) -> dict[str, float]:
    from sglang.srt.speculative.dspark_components.dspark_planner import (
        DSparkScheduleConfig,
        compute_verify_token_budget,
    )
    from sglang.srt.speculative.dspark_components.dspark_sps import SpsCostTable

    rng = np.random.default_rng(requests)
    batches = [batch(rng, requests, gamma) for _ in range(CALLS)]
    table = cost_table(requests, gamma)
    cost = CostModel(table, max_depth=gamma).bind(requests, kv_tokens=0)
    sps = SpsCostTable(
        sample_batch_tokens=list(table.tokens),
        sample_steps_per_sec=[1 / s for s in table.seconds],
        max_batch_tokens=table.tokens[-1],
    )
    config = DSparkScheduleConfig(gamma=gamma)
    times = medians(
        {
            "sglang_us": on_each(
                [torch.from_numpy(survivals.copy(order="C")) for survivals in batches],
                lambda survivals: compute_verify_token_budget(
                    history_survival_probs=survivals, sps_table=sps, cfg=config
                ),
            ),
            "budget_us": on_each(batches, lambda survivals: budget_from_survival(survivals, cost)),
            "joint_us": on_each(batches, lambda survivals: joint_from_survival(survivals, cost)),
        }
    )
    return {"requests": requests, "gamma": gamma, **{name: round(value, 1) for name, value in times.items()}}


def main() -> None:
    make_sglang_importable()
    torch.set_num_threads(1)
    print(f"{'R x gamma':>10} {'SGLang us':>10} {'budget us':>10} {'ratio':>6} {'joint us':>10} {'ratio':>6}")
    cases = []
    for requests, gamma in CASES:
        found = case(requests, gamma)
        cases.append(found)
        sglang, budget, joint = found["sglang_us"], found["budget_us"], found["joint_us"]
        size = f"{requests}x{gamma}"
        print(f"{size:>10} {sglang:>10} {budget:>10} {sglang / budget:>6.1f} {joint:>10} {sglang / joint:>6.1f}")
    print(json.dumps({"cases": cases}))


if __name__ == "__main__":
    main()
