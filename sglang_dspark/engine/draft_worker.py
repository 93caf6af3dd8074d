"""SGLang's EAGLE draft worker, made to remember what its draft distribution shows before a token is sampled.

SGLang throws the probability away for chains (topk_p is ones). Draft position 1 comes from the draft extend that runs
after every verify and prefill, position k > 1 from the (k - 1)-th draft forward. Of each a few features are kept: they
are known before x_k is sampled and do not depend on it, which sampled drafts need to stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from sglang_dspark.confidence import FEATURES, draft_features
from sglang_dspark.confidence.head import ConfidenceHead


class DSparkDraftWorker(EagleDraftWorker):
    """EagleDraftWorker with a depth that can change every step, and what the draft showed of each position.

    ``shown`` [max requests, gamma, features]: of the newest draft, by batch row; fixed storage, so that it is written
    inside captured draft graphs too. ``first_shown`` [request slots, features]: of position 1, by ``req_pool_indices``,
    which survives filtering, merging and retraction of batches.
    """

    shown: Tensor
    first_shown: Tensor

    def start_watching(self, slots: int, head: ConfidenceHead | None = None, rules: Sequence[int] = ()) -> None:
        """Allocate the buffers for ``slots`` requests and tap the draft model's forward. Before graphs are captured.

        head: its logits for ``rules`` (indices into HEAD_RULES) stand behind the features.
        """
        self.gamma = self.speculative_num_steps
        self.head, self.head_rules = head, torch.tensor(rules, dtype=torch.long, device=self.device)
        columns = len(FEATURES) + len(rules)
        self.shown = torch.zeros(slots, self.gamma, columns, device=self.device)
        self.first_shown = torch.zeros(slots, columns, device=self.device)
        self._position: int | None = None
        self._extended: Any = None
        self._draft_graph: Any = None
        self._chains = {self.gamma: (self._topk1_parents_prealloc, self._topk1_score_indices_prealloc)}
        self.draft_runner.forward = self._tap(self.draft_runner.forward)

    def watch_graphs(self) -> None:
        """Once graphs are captured: tap the draft extend's as well; on replay the model's forward does not run."""
        self._draft_graph = self.cuda_graph_runner
        if self.cuda_graph_runner_for_draft_extend is not None:
            runner = self.cuda_graph_runner_for_draft_extend
            runner.execute = self._tap(runner.execute, lambda output: output)

    def set_depth(self, depth: int) -> None:
        """Draft ``depth`` positions from the next step on, 0 to gamma. The chain constants are built once a depth."""
        self.speculative_num_steps, self.speculative_num_draft_tokens = depth, depth + 1
        if depth not in self._chains:
            self._rebuild_topk1_chain_buffers()
            self._chains[depth] = (self._topk1_parents_prealloc, self._topk1_score_indices_prealloc)
        self._topk1_parents_prealloc, self._topk1_score_indices_prealloc = self._chains[depth]
        # Captured for gamma positions; SGLang asks a draft graph for the batch's size only, and would replay them all.
        self.cuda_graph_runner = self._draft_graph if depth == self.gamma else None

    def draft(self, batch: Any, *, with_topology: bool = False) -> Any:
        """The stock draft; leaves the positions' features in ``shown``."""
        if not batch.forward_mode.is_idle():
            self.shown[: len(batch.seq_lens), 0] = self.first_shown[batch.req_pool_indices]
        return super().draft(batch, with_topology=with_topology)

    def draft_forward(self, forward_batch: Any) -> Any:
        """The stock draft loop, with its forwards counted: they are positions 2, 3, ..."""
        with self._watching(1):
            return super().draft_forward(forward_batch)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        self._keep_first(batch, result)
        return result

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, *args: Any, **kwargs: Any) -> None:
        super()._draft_extend_for_decode(batch, batch_result, *args, **kwargs)
        self._keep_first(batch, batch_result.next_draft_input)

    def _keep_first(self, batch: Any, draft_input: Any) -> None:
        if not batch.forward_mode.is_idle():
            # SGLang has cut the output to each request's last accepted row in place, on the output the tap holds.
            self.first_shown[batch.req_pool_indices] = self._show(self._extended, draft_input.bonus_tokens)
        self._extended = None

    def _show(self, output: Any, tokens: Tensor) -> Tensor:
        """[R, columns] what a draft forward over ``tokens`` [R] shows of the position after them."""
        features = draft_features(output.next_token_logits)
        if self.head is None:
            return features
        logits = self.head(output.hidden_states, tokens, features)
        return torch.cat([features, logits[:, self.head_rules]], dim=1)

    @contextmanager
    def _watching(self, position: int) -> Iterator[None]:
        self._position = position
        try:
            yield
        finally:
            self._position = None

    def _tap(
        self, forward: Callable[..., Any], logits_of: Callable[[Any], Any] = lambda output: output.logits_output
    ) -> Callable[..., Any]:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            logits = logits_of(output)
            if self._position is None:
                self._extended = logits
            elif logits.next_token_logits is not None:
                rows = len(logits.next_token_logits)
                self.shown[:rows, self._position] = self._show(logits, args[0].input_ids)
                self._position += 1
            return output

        return tapped
