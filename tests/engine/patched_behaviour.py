"""Tries out, on whichever SGLang is imported, what each patch is for that no server on a CPU shows; prints JSON.

Run by test_patched on a patched and on a stock tree: python -m tests.engine.patched_behaviour
"""

import json
from array import array
from collections.abc import Callable
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from sglang_dspark.engine import cpu

cpu.install()

from tests.engine.test_penalties import KINDS, VOCAB, batch_of, one_by_one, penalties_of, request  # noqa: E402


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


def a_run_ends_where_it_would_have_ended_token_by_token() -> bool:
    """In random runs of few tokens, under every two of the stops that there are."""
    random, wishes = Random(0), ({"stop": ["c", "ab"]}, {"stop": ["bc"], "stop_regex": ["a.a", "d$"]}, {"stop": ["e"]})
    for _ in range(2000):
        run = [random.randrange(6) for _ in range(random.randrange(1, 6))]
        params = {**random.choice(wishes), "stop_token_ids": random.choice(([], [3], [4])), "max_new_tokens": 6}
        whole, single = saying(params), saying(params)
        whole.output_ids.extend(run)
        whole.update_finish_state(len(run))
        for token in run:
            if not single.finished():
                single.output_ids.append(token)
                single.update_finish_state(1)
        ends = [(req.finished_reason and req.finished_reason.to_json(), list(req.output_ids_through_stop))
                for req in (whole, single)]  # fmt: skip
        if ends[0] != ends[1]:
            return False
    return True


def saying(params: dict) -> Any:
    """As much of a request as stops need, that has said "ab"."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = object.__new__(Req)
    words = ("a", "b", "c", "bcd", "ea", "f")
    req.tokenizer = SimpleNamespace(
        decode=lambda ids: "".join(words[i] for i in ids), encode=lambda text, **_: list(text), eos_token_id=5,
        additional_stop_token_ids=None,
    )  # fmt: skip
    req.sampling_params = SamplingParams(**params)
    req.sampling_params.normalize(req.tokenizer)
    req.output_ids, req.decoded_text = array("q", [0, 1]), ""
    req.vocab_size, req.eos_token_ids, req.rid = 6, None, "x"
    req.finished_reason = req.finished_len = req.to_finish = req.grammar = None
    return req


def a_run_is_penalised_token_by_token() -> bool:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    torch.manual_seed(0)
    wishes = list(KINDS.values())
    said, drafts = torch.randint(0, 5, (len(wishes), 4)), torch.randint(0, 5, (len(wishes), 4))
    logits = torch.randn(len(wishes), 5, VOCAB)
    batch = batch_of([request(**wish) for wish in wishes])
    penalizers = batch.sampling_info.penalizer_orchestrator
    count = getattr(ScheduleBatch, "cumulate_penalty_output_runs", ScheduleBatch.cumulate_penalty_output_tokens)
    for req in batch.reqs:
        req.penalized_output_len = 0
    for start, end in ((0, 1), (1, 1), (1, 4)):  # a verify accepts so many at once
        for req, row in zip(batch.reqs, said[:, start:end].tolist(), strict=True):
            req.output_ids += row
        count(batch)
    sums = penalties_of(penalizers, len(wishes))
    copied = penalizers.copy_for_verify() if hasattr(penalizers, "copy_for_verify") else None
    penalizers.cumulate_output_tokens(drafts[:, 0])  # of the next batch: not for this verify to see
    info = sampling_info(len(wishes), verify_penalizers=copied, **vars(sums))
    got = verified(info, logits.flatten(0, 1).clone(), drafts)
    return torch.allclose(got.view_as(logits), one_by_one(logits, drafts, wishes, said), atol=1e-6)


def a_custom_logit_processor_sees_every_row() -> bool:
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

    def without(logits: torch.Tensor, params: list[dict]) -> torch.Tensor:
        banned = [torch.tensor(one["ban"]) for one in params]
        return torch.stack([row.index_fill(0, ban, -9.0) for row, ban in zip(logits, banned, strict=True)])

    entry = ProcessorEntry(processor=without, rows=[1], indices=torch.tensor([1]))
    info = sampling_info(
        2, has_custom_logit_processor=True, custom_logit_processor={7: entry}, custom_params=[None, {"ban": [3]}]
    )
    got = verified(info, torch.zeros(2 * 3, 5), torch.tensor([[1, 2], [1, 2]])).view(2, 3, 5)
    return bool((got[0] == 0).all() and (got[1, :, 3] == -9).all() and (got[1, :, :3] == 0).all())


def sampling_info(requests: int, **given: Any) -> Any:
    """As much as a greedy verify asks for."""

    class Info(SimpleNamespace):
        def __len__(self) -> int:
            return requests

    defaults = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "verify_penalizers", "logit_bias"))
    return Info(**{**defaults, "is_all_greedy": True, "has_custom_logit_processor": False, "device": "cpu", **given})


def verified(info: Any, logits: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """The logits [R * (depth + 1), V] as SGLang's eagle_sample changes them, drafts [R, depth] being chains."""
    from sglang.srt.speculative import eagle_utils

    requests, width = len(drafts), drafts.shape[1] + 1
    index = torch.arange(requests * width).view(requests, width)
    following = torch.tensor([*range(1, width), -1]).expand(requests, width).contiguous()
    verify_input = SimpleNamespace(
        draft_token=torch.cat([torch.zeros(requests, 1, dtype=torch.int64), drafts], 1).flatten(), tree_topk=1,
        draft_token_num=width, max_tree_depth=width, retrieve_index=index, retrieve_next_token=following,
        retrieve_next_sibling=torch.full_like(following, -1),
    )  # fmt: skip
    batch = SimpleNamespace(
        device="cpu", forward_mode=SimpleNamespace(is_idle=lambda: False), seq_lens=torch.ones(requests),
        sampling_info=info,
    )  # fmt: skip
    spec = SimpleNamespace(speculative_use_rejection_sampling=False)
    with patch.object(eagle_utils, "get_spec", lambda: spec):
        predicted, _, _ = eagle_utils.eagle_sample(verify_input, batch, SimpleNamespace(next_token_logits=logits))
    assert int(predicted[0]) == int(logits[0].argmax())
    return logits


CHECKS: tuple[Callable[[], bool], ...] = (
    min_p_of_block_drafts,
    tree_samples_follow_the_target,
    ragged_batch_on_uniform_graphs_is_declined,
    a_plugins_algorithm_has_all_methods,
    ranks_wait_for_the_confidence,
    a_forced_budget_counts_without_a_table,
    a_run_ends_where_it_would_have_ended_token_by_token,
    a_run_is_penalised_token_by_token,
    a_custom_logit_processor_sees_every_row,
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
