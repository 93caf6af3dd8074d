"""Tries out, on whichever SGLang is imported, what each patch is for that no server on a CPU shows; prints JSON.

Run by test_patched on a patched and on a stock tree: python -m tests.engine.patched_behaviour
"""

import json
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import torch

from sglang_dspark.engine import cpu

cpu.install()


def min_p_of_block_drafts() -> bool:
    from sglang.srt.speculative.dflash_utils import build_speculative_verify_target_probs

    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    info = SimpleNamespace(
        temperatures=torch.ones(1, 1), top_ks=torch.tensor([1 << 30]), top_ps=torch.ones(1), min_ps=torch.tensor([0.4]),
        need_top_k_sampling=False, need_top_p_sampling=False, need_min_p_sampling=True,
    )  # fmt: skip
    probs = build_speculative_verify_target_probs(next_token_logits=logits, sampling_info=info, draft_token_num=1, bs=1)
    return torch.allclose(probs.flatten(), torch.tensor([0.625, 0.375, 0.0, 0.0]))


def tree_samples_follow_the_target() -> bool:
    """A root with two siblings, the first of which has a child: what is produced first must be distributed as p."""
    from sglang.kernels.ops.speculative.verify_sampling import tree_speculative_sampling_target_only as sample

    torch.manual_seed(0)
    n, p = 40_000, torch.tensor([0.1, 0.2, 0.3, 0.4])
    candidates = torch.tensor([[9, 1, 3, 2]]).expand(n, 4)  # anchor, sibling 1, its sibling 3, and 2 below token 1
    index = torch.arange(4 * n).view(n, 4)
    predicts, accepted = torch.zeros(4 * n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    path = torch.full((n, 3), -1, dtype=torch.int32)
    sample(
        predicts=predicts, accept_index=path, accept_token_num=accepted, candidates=candidates, retrive_index=index,
        retrive_next_token=torch.tensor([[1, 3, -1, -1]]).expand(n, 4),
        retrive_next_sibling=torch.tensor([[-1, 2, -1, -1]]).expand(n, 4),
        uniform_samples=torch.rand(n, 4), uniform_samples_for_final_sampling=torch.rand(n),
        target_probs=p.expand(n, 4, 4).clone(), draft_probs=torch.zeros(n, 4, 4), threshold_single=1.0,
        threshold_acc=1.0, deterministic=True,
    )  # fmt: skip
    first = predicts.view(n, 4)[:, 0].long()
    share = torch.bincount(first, minlength=4) / n
    after = predicts.view(n, 4)[accepted >= 1][first[accepted >= 1] == 1][:, 1].long()  # what follows token 1
    following = torch.bincount(after, minlength=4) / len(after)
    whole = (path >= 0).sum(1) == accepted + 1
    return bool(
        ((share - p).abs() < 0.015).all()
        and ((following - p).abs() < 0.03).all()
        and whole.all()
        and accepted.max() == 2
    )


def ragged_batch_on_uniform_graphs_is_declined() -> bool:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    runner = object.__new__(DecodeCudaGraphRunner)
    runner.ragged_verify_mode, runner.captured_req_width = False, 4
    # Its rows say nothing of their width: only the layout tells.
    spec_info = SimpleNamespace(ragged_verify_layout=object(), num_tokens_per_req=-1)
    batch = SimpleNamespace(replace_embeds=None, spec_info=spec_info)
    return runner.can_run_graph(batch) is False


def a_plugins_algorithm_has_all_methods() -> bool:
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    algorithm = CustomSpecAlgo("MINE", lambda _: object)
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32))
    future_map = algorithm.create_future_map("cpu", pool)
    return (
        not algorithm.need_topk() and not algorithm.carries_draft_hidden_states() and future_map.spec_algo is algorithm
    )


def ranks_wait_for_the_confidence() -> bool:
    from sglang.srt.managers.overlap_utils import ConfidenceRelay

    class Late:
        """A copy that this rank sees end later than others."""

        waited = False

        def query(self) -> bool:
            return self.waited

        def synchronize(self) -> None:
            self.waited = True

    relay = ConfidenceRelay(device=torch.device("cpu"), req_pool_size=4, pool=None)
    relay.initialized, relay.ring_pos, relay.copy_done = True, 3, [Late(), Late(), Late()]
    relay.conf_ring, relay.gen_ring = torch.rand(3, 4, 2), torch.zeros(3, 4, dtype=torch.int64)
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(future_indices=torch.tensor([1])), req_pool_indices_cpu=torch.tensor([1])
    )
    resolved = relay.resolve(batch, stream=object(), publish_ready=object())
    return resolved is not None and torch.equal(resolved.confidence, relay.conf_ring[1, [1]])


def a_forced_budget_counts_without_a_table() -> bool:
    from sglang.srt.speculative.dspark_components import dspark_planner as planner

    it = object.__new__(planner.DSparkVerifyPlanner)
    it._ragged_verify_mode, it._is_verify_all = planner.RaggedVerifyMode.COMPACT, True
    it._budget_planner = SimpleNamespace(forced_budget_frac=0.5)
    it._uniform_layout_cache, it._dynamic_graph_tier, it._align_verify_tokens_to_graph_tier = {}, False, False
    it.verify_num_draft_tokens, it._schedule_cfg = 5, planner.DSparkScheduleConfig(gamma=4)
    it._tp_sync = SimpleNamespace(sync=lambda *_: None)
    it.model_runner = SimpleNamespace(decode_cuda_graph_runner=None)
    layout = it.schedule_layout(
        req_pool_indices=torch.arange(3), prefix_lens=torch.ones(3), device=torch.device("cpu"),
        confidence=torch.full((3, 4), 0.9), budget=6,
    )  # fmt: skip
    return layout is not None and layout.total_verify_tokens == 9


CHECKS: tuple[Callable[[], bool], ...] = (
    min_p_of_block_drafts,
    tree_samples_follow_the_target,
    ragged_batch_on_uniform_graphs_is_declined,
    a_plugins_algorithm_has_all_methods,
    ranks_wait_for_the_confidence,
    a_forced_budget_counts_without_a_table,
)


def main() -> None:
    found = {}
    for check in CHECKS:
        found[check.__name__] = False
        with suppress(AttributeError, TypeError):  # what the stock tree lacks
            found[check.__name__] = bool(check())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
