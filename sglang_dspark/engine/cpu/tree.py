"""Draft trees: builds the links and masks of a tree of draft tokens, and walks it to find what the target accepts.

A tree of n nodes per request; node 0 is the anchor. A node's children are numbered after it. `retrieve_next_token` is a
node's first child and `retrieve_next_sibling` the next child of the same parent, -1 for none; a chain has no siblings.
Each public function has the arguments and in-place outputs of the sgl_kernel operation of its name (SGLang 0.5.23,
kernels/ops/speculative/spec_tree.py and reconstruct_tree.py call them).
"""

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1  # SGLang's TreeMaskMode; its bit-packed third mode has no CPU caller


def _links(parent: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling of every node, int64 [R, n], from parent [R, n] int64 (-1: no parent)."""
    n = parent.shape[1]
    node = torch.arange(n)
    is_child = parent[:, None, :] == node[:, None]  # [R, parent, child]
    first_child = torch.where(is_child, node, n).amin(-1)
    later_sibling = (parent[:, None, :] == parent[:, :, None]) & (node > node[:, None]) & (parent >= 0)[:, :, None]
    next_sibling = torch.where(later_sibling, node, n).amin(-1)
    return first_child.masked_fill_(first_child == n, -1), next_sibling.masked_fill_(next_sibling == n, -1)


def _parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Parent of every node, int64 [R, n]: 0 is the anchor; -1 for the anchor itself and for nodes cut from the tree.

    selected_index [R, n-1]: the candidate number of every drafted node; candidates come in tables of topk per expanded
    node, so number // topk is the table, table 0 hangs on the anchor, and parent_list holds the candidate that others
    hang on.
    """
    table = selected_index // topk
    expanded = parent_list.gather(1, table.clamp(max=parent_list.shape[1] - 1)) if parent_list.shape[1] else table
    match = selected_index[:, None, :] == expanded[:, :, None]
    position = torch.where(match.any(-1), match.int().argmax(-1) + 1, -1)
    parent = torch.where(table == 0, 0, position)
    return torch.cat([parent.new_full((parent.shape[0], 1), -1), parent], dim=1)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Write the tree that target verify consumes: mask (bool), positions and links, all in place.

    parent_list [R, topk * (depth - 1) + 1], selected_index [R, n - 1], verified_seq_len [R]: int; n = draft_token_num.
    tree_mask, flat: QLEN_ONLY [R, n, n], or FULL_MASK with every row preceded by seq_len columns that are left alone.
    positions [R * n]; the retrieve tensors [R, n]. Raises ValueError for any other mask mode.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise ValueError(f"tree_mask_mode {int(tree_mask_mode)} has no CPU form; use FULL_MASK (0) or QLEN_ONLY (1)")
    R, n = verified_seq_len.numel(), draft_token_num
    parent = _parents(parent_list.long(), selected_index.long(), topk)
    visible = torch.zeros(R, n, n, dtype=torch.bool)
    visible[:, :, 0] = True  # every node sees the anchor
    request = torch.arange(R)
    for node in range(1, n):  # parents come first, so a node's ancestors are complete when it copies them
        visible[:, node] = visible[request, parent[:, node]] & (parent[:, node] >= 0)[:, None]
        visible[:, node, node] = True
    visible[:, :, 0] = True

    first_child, next_sibling = _links(parent)
    retrieve_index.copy_(torch.arange(R * n).view(R, n))
    retrieve_next_token.copy_(first_child)
    retrieve_next_sibling.copy_(next_sibling)
    positions.copy_((verified_seq_len.long()[:, None] + visible.sum(-1) - 1).view(-1))
    if tree_mask_mode == QLEN_ONLY:
        tree_mask.view(-1)[: R * n * n] = visible.view(-1)
        return
    start = 0
    for row, seq_len in zip(visible, verified_seq_len.tolist(), strict=True):
        width = seq_len + n
        tree_mask[start : start + n * width].view(n, width)[:, seq_len:] = row
        start += n * width


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Recover positions and links, in place, from a bool mask [R * n * n] whose element [r, i, j] says j is above i."""
    R, n = batch_size, draft_token_num
    ancestors = tree_mask.view(-1)[: R * n * n].view(R, n, n).bool().tril(-1)
    parent = torch.where(ancestors, torch.arange(n), -1).amax(-1)
    first_child, next_sibling = _links(parent)
    retrieve_index.copy_(torch.arange(R * n).view_as(retrieve_index))
    retrieve_next_token.copy_(first_child.view_as(retrieve_next_token))
    retrieve_next_sibling.copy_(next_sibling.view_as(retrieve_next_sibling))
    positions.copy_((verified_seq_len.long()[:R, None] + ancestors.sum(-1)).view_as(positions))


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the longest path from the anchor on which every draft token equals the target's argmax before it.

    candidates, target_predict and the links [R, n] int. Out, int32: accept_index [R, steps + 1], flat node numbers of
    the path; accept_token_num [R], accepted drafts without the bonus; predicts [R * n], the target's token at the
    path's nodes. Walked in Python: at most R x steps short comparisons, cheaper than as many tensor operations.
    """
    width = accept_index.shape[1]
    flat_target = target_predict.reshape(-1).tolist()
    rows = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    all_predicts, paths = predicts.tolist(), accept_index.tolist()
    lengths = []
    for path, (tokens, index, first_child, sibling) in zip(paths, rows, strict=True):
        node, last, accepted = 0, index[0], 0
        path[0] = last
        while accepted + 1 < width:
            node = first_child[node]
            while node != -1 and tokens[node] != flat_target[last]:
                node = sibling[node]
            if node == -1:
                break
            all_predicts[last] = flat_target[last]
            last, accepted = index[node], accepted + 1
            path[accepted] = last
        all_predicts[last] = flat_target[last]
        lengths.append(accepted)
    if lengths:
        predicts.copy_(torch.tensor(all_predicts))
        accept_index.copy_(torch.tensor(paths))
        accept_token_num.copy_(torch.tensor(lengths))
