"""Batches under LoRA adapters: SGLang tells whose token is whose by rows of one length, so rows have one length."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.engine import worker as worker_module
from sglang_dspark.engine.requests import has_adapters
from sglang_dspark.engine.worker import DSparkWorker, even
from sglang_dspark.schedule import Plan


def batch(*adapters):
    info = SimpleNamespace(custom_logit_processor=None)
    mode = SimpleNamespace(is_idle=lambda: False)
    spec = SimpleNamespace(retrieve_next_token=torch.ones(len(adapters), 4), draft_probs=None)
    reqs = [SimpleNamespace(lora_id=adapter) for adapter in adapters]
    return SimpleNamespace(
        reqs=reqs, sampling_info=info, forward_mode=mode, seq_lens=torch.zeros(len(reqs)), spec_info=spec
    )


@pytest.mark.parametrize("budget, depth", ((0, 0), (1, 1), (4, 1), (5, 2), (20, 5)))
def test_the_plan_gives_every_request_the_same_budget_rounded_up(budget, depth):
    plan = even(Plan(5, budget, "scheduled", 5.0, 0.01, 500.0), 4)
    assert (plan.depth, plan.budget) == (depth, 4 * depth)


def test_one_adapter_is_enough():
    assert has_adapters(batch(None, "a", None)) and not has_adapters(batch(None, None))


@pytest.mark.parametrize("adapter", (None, "a"))
def test_under_adapters_the_target_sees_whole_rows_whatever_was_allocated(monkeypatch, adapter):
    it, described = object.__new__(DSparkWorker), batch(None, adapter)
    it._plan, it._batch = Plan(3, 4, "scheduled", 5.0, 0.01, 500.0), SimpleNamespace()
    it._draft_worker = SimpleNamespace(shown=torch.zeros(2, 5, 3))
    it.gamma, it.topk, it.device, it.plan_stream, it.plan_stream_ctx = 5, 1, "cpu", None, None
    it.req_to_token_pool = it.token_to_kv_pool_allocator = None
    it._target_worker = SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=None))
    it.faults = SimpleNamespace(run=lambda part, action, _: action() if part == "allocation" else None)
    it._allocate = lambda *_: (None, torch.tensor([2, 4], dtype=torch.int32))
    it.agreement = SimpleNamespace(lengths=lambda lens: lens)
    it.policy = None
    seen = {}

    def verify(given, *, target_worker, **_):
        seen["rows"], seen["spec"] = target_worker._rows, given.spec_info
        return SimpleNamespace()

    monkeypatch.setattr(worker_module, "run_eagle_verify", verify)
    result = it.verify(described)
    if adapter:
        assert seen["rows"].kept is None  # the layout only says how wide the rows are
        assert result.cap_lens.tolist() == [4, 4]
    else:
        assert seen["rows"].layout.verify_lens_cpu == [2, 4] and result.cap_lens.tolist() == [2, 4]
