"""What the target says of compact rows, as SGLang's EAGLE code reads it: in uniform rows of depth + 1 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sglang_dspark.engine.verify import RaggedRows


class VerifyTarget:
    """The target worker as SGLang's run_eagle_verify sees it: takes compact rows, gives uniform ones, counts tokens.

    likeliest: whether nothing is read of the logits but each row's most likely token, see :func:`reads_likeliest`.
    """

    def __init__(self, worker: Any, rows: RaggedRows | None, likeliest: bool = False) -> None:
        self._worker = worker
        self._rows = rows if rows is not None and rows.kept is not None else None  # full rows are uniform as they are
        self._likeliest = likeliest
        self.tokens_seen = 0
        """Tokens that the target forward was given: the shape of its input, not what we meant to send."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def forward_batch_generation(self, batch: Any, *, forward_batch: Any, **kwargs: Any) -> Any:
        """The target forward over the compact rows; logits and hidden states come back in uniform rows."""
        self.tokens_seen += len(forward_batch.input_ids)
        result = self._worker.forward_batch_generation(batch, forward_batch=forward_batch, **kwargs)
        output, rows = result.logits_output, self._rows
        if self._likeliest and (rows is not None or output.next_token_logits.is_cpu):
            output.next_token_logits = Logits(output.next_token_logits, rows)
        else:
            output.next_token_logits = scatter_rows(output.next_token_logits, rows)
        output.hidden_states = scatter_rows(output.hidden_states, rows)
        return result


def scatter_rows(compact: Tensor | None, rows: RaggedRows | None) -> Tensor | None:
    """[tokens of the forward, ...] to [R * width, ...]; tokens that were not verified get zeros, finite and never read.

    rows: None where all are full, and nothing is to be done.
    """
    if compact is None or rows is None:
        return compact
    assert rows.kept is not None
    uniform = compact.new_zeros((rows.layout.bs * rows.width, *compact.shape[1:]))
    uniform[rows.kept] = compact[: len(rows.kept)]
    return uniform


def reads_likeliest(batch: Any) -> bool:
    """Whether the verify of this batch is greedy, and nobody changes or asks for its logits before."""
    info = batch.sampling_info
    changed = (
        info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or info.logit_bias is not None
        or info.has_custom_logit_processor
        or info.has_watermark_candidates
    )
    return info.is_all_greedy and not (changed or batch.has_grammar or batch.return_logprob)


class Logits:
    """Logits [R * width, V] of a greedy verify, of which only the compact rows exist until more is asked for.

    Most vocabularies are so large that writing the uniform rows, and looking for the largest logit in those that were
    never verified, would take longer than everything else that a ragged verify adds to a step. rows: None where all
    are full.
    """

    def __init__(self, compact: Tensor, rows: RaggedRows | None) -> None:
        self._compact, self._rows = compact, rows
        self._whole: Tensor | None = None
        tokens = len(compact) if rows is None else rows.layout.bs * rows.width
        self.shape = torch.Size((tokens, compact.shape[1]))
        self.device, self.dtype, self.is_cuda = compact.device, compact.dtype, compact.is_cuda

    def likeliest(self) -> Tensor:
        """[R * width] int64, the most likely token after each that was verified; 0 after the others."""
        compact = self._compact if self._rows is None else self._compact[: len(self._rows.kept)]
        # On a CPU numpy takes a thirteenth of the time that torch does.
        plain = compact.is_cpu and compact.dtype == torch.float32
        found = torch.from_numpy(compact.numpy().argmax(-1)) if plain else compact.argmax(-1)
        return scatter_rows(found, self._rows)

    def whole(self) -> Tensor:
        """The tensor itself, from now on the only truth: it may be changed in place."""
        if self._whole is None:
            self._whole = scatter_rows(self._compact, self._rows)
        assert self._whole is not None
        return self._whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def __getitem__(self, at: Any) -> Tensor:
        return self.whole()[at]

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.argmax and args[0]._whole is None and kwargs == {"dim": -1}:
            return args[0].likeliest()
        args, kwargs = tree_map(lambda value: value.whole() if isinstance(value, cls) else value, (args, kwargs))
        return function(*args, **kwargs)
