"""Draft trees on CPU: links, masks and greedy acceptance equal to walking the tree node by node."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_dspark.engine.cpu.tree import (
    FULL_MASK,
    QLEN_ONLY,
    build_tree_kernel_efficient_cpu,
    reconstruct_indices_from_tree_mask,
    verify_tree_greedy_cpu,
)


def draft_tree(topk: int, depth: int, n: int, seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """A tree as EAGLE drafts it: (parent_list, selected_index, parent of every node).

    Step 0 gives candidates 0..topk-1 under the anchor. Every later step expands topk candidates of the step before into
    topk candidates each, numbered on. The n - 1 selected candidates always come with their parents.
    """
    generator = torch.Generator().manual_seed(seed)
    parent_list, parent_of = [-1], {c: None for c in range(topk)}
    frontier = list(range(topk))
    for _ in range(1, depth):
        base = len(parent_of)
        parent_list += frontier
        parent_of.update({base + i: frontier[i // topk] for i in range(topk * topk)})
        frontier = sorted((base + torch.randperm(topk * topk, generator=generator)[:topk]).tolist())
    selected: set[int] = set()
    while len(selected) < n - 1:
        open_ = [c for c, p in parent_of.items() if c not in selected and (p is None or p in selected)]
        selected.add(open_[int(torch.randint(len(open_), (1,), generator=generator))])
    nodes = sorted(selected)
    parents = [-1] + [0 if parent_of[c] is None else nodes.index(parent_of[c]) + 1 for c in nodes]
    return torch.tensor(parent_list), torch.tensor(nodes), parents


def ancestors_and_self(parents: list[int], node: int) -> set[int]:
    return {node} if parents[node] < 0 else {node} | ancestors_and_self(parents, parents[node])


def expected_links(parents: list[int]) -> tuple[list[int], list[int]]:
    children = {p: [c for c in range(len(parents)) if parents[c] == p] for p in range(len(parents))}
    first = [children[p][0] if children[p] else -1 for p in range(len(parents))]
    sibling = [-1] * len(parents)
    for nodes in children.values():
        for a, b in itertools.pairwise(nodes):
            sibling[a] = b
    return first, sibling


def build(trees: list[tuple[Tensor, Tensor, list[int]]], seq_lens: list[int], topk: int, depth: int, mode: int):
    R, n = len(trees), len(trees[0][2])
    mask_size = R * n * n if mode == QLEN_ONLY else sum(seq_lens) * n + R * n * n
    out = {
        "mask": torch.ones(mask_size, dtype=torch.bool),
        "positions": torch.empty(R * n, dtype=torch.int64),
        "index": torch.full((R, n), -1),
        "first": torch.full((R, n), -1),
        "sibling": torch.full((R, n), -1),
    }
    build_tree_kernel_efficient_cpu(
        torch.stack([t[0] for t in trees]), torch.stack([t[1] for t in trees]), torch.tensor(seq_lens),
        *out.values(), topk, depth, n, mode,
    )  # fmt: skip
    return out


shapes = st.sampled_from([(1, 3, 4), (1, 1, 2), (2, 3, 6), (4, 3, 12), (3, 2, 5)])


@pytest.mark.parametrize("mode", [QLEN_ONLY, FULL_MASK])
@given(shape=shapes, seed=st.integers(0, 200))
def test_built_tree_has_the_links_masks_and_positions_of_its_drafts(mode, shape, seed):
    topk, depth, n = shape
    trees = [draft_tree(topk, depth, n, seed + i) for i in range(3)]
    seq_lens = [7, 0, 3]
    out = build(trees, seq_lens, topk, depth, mode)
    assert out["index"].view(-1).tolist() == list(range(3 * n))
    start = 0
    for r, (_, _, parents) in enumerate(trees):
        first, sibling = expected_links(parents)
        assert out["first"][r].tolist() == first
        assert out["sibling"][r].tolist() == sibling
        prefix = seq_lens[r] if mode == FULL_MASK else 0
        rows = out["mask"][start : start + n * (prefix + n)].view(n, prefix + n)
        start += rows.numel()
        assert rows[:, :prefix].all(), "the committed prefix stays visible"
        for node in range(n):
            above = ancestors_and_self(parents, node)
            assert set(rows[node, prefix:].nonzero().view(-1).tolist()) == above
            assert out["positions"][r * n + node] == seq_lens[r] + len(above) - 1


@given(shapes, st.integers(0, 200))
def test_links_are_recovered_from_the_mask_alone(shape, seed):
    topk, depth, n = shape
    seq_lens = [4, 9]
    built = build([draft_tree(topk, depth, n, seed + i) for i in range(2)], seq_lens, topk, depth, QLEN_ONLY)
    again = {k: torch.full_like(v, -7) for k, v in built.items() if k != "mask"}
    reconstruct_indices_from_tree_mask(built["mask"], torch.tensor(seq_lens), *again.values(), 2, n)
    for name, value in again.items():
        assert torch.equal(value, built[name]), name


def test_unknown_mask_mode_is_refused():
    with pytest.raises(ValueError, match="tree_mask_mode 2"):
        build([draft_tree(1, 3, 4, 0)], [5], 1, 3, 2)


def accept(candidates: Tensor, target: Tensor, first: Tensor, sibling: Tensor, steps: int):
    R, n = candidates.shape
    predicts = torch.zeros(R * n, dtype=torch.int32)
    path = torch.full((R, steps + 1), -1, dtype=torch.int32)
    count = torch.zeros(R, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts=predicts, accept_index=path, accept_token_num=count, candidates=candidates,
        retrive_index=torch.arange(R * n).view(R, n), retrive_next_token=first, retrive_next_sibling=sibling,
        target_predict=target,
    )  # fmt: skip
    return predicts, path, count


@given(shapes, st.integers(0, 500))
def test_acceptance_is_the_longest_path_the_target_agrees_with(shape, seed):
    topk, depth, n = shape
    generator = torch.Generator().manual_seed(seed)
    trees = [draft_tree(topk, depth, n, seed + i) for i in range(3)]
    built = build(trees, [5, 6, 7], topk, depth, QLEN_ONLY)
    # Siblings get different tokens, as top-k drafts do; a target over few tokens agrees often.
    candidates = torch.stack([torch.arange(n) % max(topk, 2) for _ in trees])
    target = torch.randint(0, max(topk, 2), (3, n), generator=generator)
    predicts, path, count = accept(candidates, target, built["first"], built["sibling"], depth)
    for r, (_, _, parents) in enumerate(trees):
        node, expected = 0, [0]
        while len(expected) <= depth:
            matching = [c for c in range(n) if parents[c] == node and candidates[r, c] == target[r, node]]
            if not matching:
                break
            node = matching[0]
            expected.append(node)
        assert count[r] == len(expected) - 1
        assert path[r].tolist() == [r * n + x for x in expected] + [-1] * (depth + 1 - len(expected))
        assert [int(predicts[r * n + x]) for x in expected] == target[r, expected].tolist()


def test_a_chain_cut_short_is_accepted_only_up_to_the_cut():
    """A ragged verify pass cuts the links past its draft length; agreeing tokens behind the cut must not count."""
    tokens = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3]])
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    first = torch.tensor([[1, 2, 3, -1], [1, -1, -1, -1]])
    predicts, path, count = accept(tokens, target, first, torch.full((2, 4), -1), 3)
    assert count.tolist() == [3, 1]
    assert path.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert predicts.tolist() == [1, 2, 3, 4, 1, 2, 0, 0]


def test_an_empty_batch_is_accepted():
    predicts, path, count = accept(*(torch.empty(0, 4, dtype=torch.int64) for _ in range(4)), 3)
    assert predicts.numel() == path.numel() == count.numel() == 0
