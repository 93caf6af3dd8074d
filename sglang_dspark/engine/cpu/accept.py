"""What follows an accepted draft: the bonus token, the accepted slots, and the shifted input of the next draft step.

Each function has the arguments and in-place outputs of the sgl_kernel operation of its name (SGLang 0.5.23,
kernels/ops/speculative/eagle.py and multi_layer_eagle.py call them).
"""

import torch
from torch import Tensor


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """bonus_tokens [R] = the last accepted token of every request.

    accept_tokens [R * accept_stride]: accepted tokens, a row per request; accept_lens [R]: how many, the bonus
    included.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last.long()])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the accepted tokens' slots, in accept_index's order (-1: none), to the front of accept_out_cache_loc."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift every request's segment of input_ids left by one and write its new token, topk_index [R], into the gap.

    The gap is the segment's last place, or select_index [R] (a place in input_ids) where given. Empty segments are
    skipped.
    """
    starts, lengths = extend_start_loc.tolist(), extend_seq_lens.tolist()
    for start, length in zip(starts, lengths, strict=True):
        if length > 1:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
    live = extend_seq_lens > 0
    gap = (extend_start_loc + extend_seq_lens - 1 if select_index is None else select_index)[live]
    input_ids[gap.long()] = topk_index.reshape(live.numel(), -1)[:, 0][live].to(input_ids.dtype)
