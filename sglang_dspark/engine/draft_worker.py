"""SGLang's EAGLE draft worker, made to remember what its draft distribution shows before a token is sampled.

SGLang throws the probability away for chains (topk_p is ones). Draft position 1 comes from the draft extend that runs
after every verify and prefill, position k > 1 from the (k - 1)-th draft forward. Of each a few features are kept: they
are known before x_k is sampled and do not depend on it, which sampled drafts need to stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from sglang_dspark.confidence import FEATURES, draft_features
from sglang_dspark.confidence.head import ConfidenceHead
from sglang_dspark.engine.sampling import DraftVocabulary, drawing_from


class DepthState(NamedTuple):
    """What drafting at one depth needs of SGLang: as in its adaptive mode, backends and graphs know their depth."""

    draft_backend: Any
    draft_graph: Any
    extend_backend: Any
    extend_graph: Any
    chain: tuple[Tensor, Tensor]
    """Parents and score indices of a chain of that depth."""


class DSparkDraftWorker(EagleDraftWorker):
    """EagleDraftWorker with a depth that can change every step, and what the draft showed of each position.

    ``shown`` [max requests, gamma, features]: of the newest draft, by batch row; fixed storage, so that it is written
    inside captured draft graphs too. ``first_shown`` [request slots, features]: of position 1, by ``req_pool_indices``,
    which survives filtering, merging and retraction of batches.
    """

    shown: Tensor
    first_shown: Tensor
    vocabulary: DraftVocabulary | None = None
    """The tokens that the draft can propose, where those are not all of the target's."""

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Stock, which refuses sampled drafts of a reduced vocabulary: our worker widens what it draws from, so SGLang
        gets to see the reduced one only afterwards."""
        super().alloc_memory_pool(*args, **kwargs)
        if self.vocabulary is not None:
            self.hot_token_id = self.vocabulary.tokens

    def init_lm_head(self) -> None:
        """Stock; see alloc_memory_pool."""
        super().init_lm_head()
        if self.hot_token_id is not None:
            self.vocabulary = DraftVocabulary(self.hot_token_id, self.target_worker.model_config.vocab_size)
            self.hot_token_id = None

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
        self.depths: dict[int, DepthState] = {}
        self.draft_runner.forward = self._tap(self.draft_runner.forward)

    def set_depth(self, depth: int) -> None:
        """Draft ``depth`` positions from the next step on, 0 to gamma."""
        self.speculative_num_steps, self.speculative_num_draft_tokens = depth, depth + 1
        state = self.depths[depth]
        self.draft_attn_backend = self.draft_runner.draft_attn_backend = state.draft_backend
        self.draft_extend_attn_backend = state.extend_backend
        if state.extend_backend is not None:
            self.draft_runner.attn_backend = state.extend_backend
        self.cuda_graph_runner = state.draft_graph
        self.cuda_graph_runner_for_draft_extend = state.extend_graph
        self._topk1_parents_prealloc, self._topk1_score_indices_prealloc = state.chain

    def keep_depth(self) -> None:
        """Keep what SGLang has made for the depth that the worker is set to."""
        graph = self.cuda_graph_runner_for_draft_extend
        if graph is not None:  # on replay the model's forward does not run
            graph.execute = self._tap(graph.execute, lambda output: output)
        self.depths[self.speculative_num_steps] = DepthState(
            self.draft_attn_backend,
            self.cuda_graph_runner,
            self.draft_extend_attn_backend,
            graph,
            (self._topk1_parents_prealloc, self._topk1_score_indices_prealloc),
        )

    @contextmanager
    def contexts(self) -> Iterator[None]:
        """What SGLang enters around everything that its draft worker makes or runs."""
        with (
            draft_tp_context(self.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    def _configure_qsa_mtp_index_share(self) -> None:
        """Off, as in SGLang's adaptive mode: what one depth's extend selected would be looked up by another's draft."""

    def draft(self, batch: Any, *, with_topology: bool = False) -> Any:
        """The stock draft; leaves the positions' features in ``shown``."""
        if not batch.forward_mode.is_idle():
            self.shown[: len(batch.seq_lens), 0] = self.first_shown[batch.req_pool_indices]
        return super().draft(batch, with_topology=with_topology)

    def draft_forward(self, forward_batch: Any) -> Any:
        """The stock draft loop, with its forwards counted: they are positions 2, 3, ..."""
        with self._watching(1), drawing_from(self.vocabulary):
            return super().draft_forward(forward_batch)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        if self.vocabulary is not None and result.draft_probs is not None:
            result.draft_probs = self.vocabulary.widen(result.draft_probs)
        self._keep_first(batch, result)
        return result

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, *args: Any, **kwargs: Any) -> None:
        with drawing_from(self.vocabulary):
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
