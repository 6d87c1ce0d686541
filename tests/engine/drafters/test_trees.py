"""The shapes of trees: which candidates stand where, and whom their probes follow."""

from __future__ import annotations

import torch

from bild_lab.engine.draft import ROOT, Draft
from bild_lab.engine.drafters.trees import Growth, Node, TokenTrees, efficient_tree, full_tree, grown

CPU = torch.device("cpu")
CANDIDATES = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])


def draft(
    grow: Growth, widths: tuple[int, ...], depth: int, candidates: torch.Tensor | None, *probes: int, **more: bool
) -> Draft:
    trees = TokenTrees(grown(grow, widths, *probes, **more), 40, CPU)
    return trees.draft(candidates, trees.layout(depth, 9))


def test_in_an_efficient_tree_only_the_most_likely_of_each_depth_has_children() -> None:
    """Figure 5 with 3 candidates at each of 2 depths."""
    assert efficient_tree([3, 2]) == [
        Node(0, 0, ROOT),
        Node(0, 1, ROOT),
        Node(0, 2, ROOT),
        Node(1, 0, 0),
        Node(1, 1, 0),
    ]
    drafted = draft(efficient_tree, (3, 2, 1), 3, CANDIDATES)
    assert drafted.token_list == [10, 11, 12, 20, 21, 30]
    assert drafted.parent_list == [ROOT, ROOT, ROOT, 0, 0, 3]
    assert drafted.depth == 3


def test_in_a_full_tree_every_node_has_children() -> None:
    drafted = draft(full_tree, (2, 1, 2), 3, CANDIDATES[:, :2])
    assert drafted.token_list == [10, 11, 20, 20, 30, 31, 30, 31]
    assert drafted.parent_list == [ROOT, ROOT, 0, 1, 2, 2, 3, 3]


def test_a_tree_is_cut_where_fewer_tokens_may_come() -> None:
    assert draft(full_tree, (2, 2, 2), 1, CANDIDATES[:, :2]).token_list == [10, 11]
    assert len(draft(full_tree, (2, 2, 2), 2, CANDIDATES[:, :2])) == 6
    assert len(draft(full_tree, (2, 2, 2), 0, None)) == 0


def test_without_candidates_the_last_token_still_has_its_probes() -> None:
    drafted = draft(efficient_tree, (2, 1), 0, None, 2)
    assert len(drafted) == 0 and drafted.probes.tolist() == [40, 41]
    assert drafted.under(7).tolist() == [7, 40, 41]
    assert drafted.tree.parents.tolist() == [ROOT, 0, 1]


def test_every_row_has_a_chain_of_probes_below_it() -> None:
    drafted = draft(efficient_tree, (2, 1), 2, CANDIDATES[:, :2], 2)
    rows, tree = drafted.under(7), drafted.tree
    assert rows.tolist() == [7, 10, 11, 20, *[40, 41] * 4]
    assert tree.parents.tolist() == [ROOT, 0, 0, 1, 0, 4, 1, 6, 2, 8, 3, 10]
    assert tree.depths.tolist() == [0, 1, 1, 2, 1, 2, 2, 3, 2, 3, 3, 4]


def test_a_straightforward_chain_has_probes_below_its_root_alone() -> None:
    drafted = draft(efficient_tree, (1, 1), 2, CANDIDATES[:, :1], 2, everywhere=False)
    rows, tree = drafted.under(7), drafted.tree
    assert rows.tolist() == [7, 10, 20, 40, 41]
    assert tree.parents.tolist() == [ROOT, 0, 1, 0, 3]


def test_a_layout_tells_where_the_probes_of_each_row_are_and_how_many() -> None:
    trees = TokenTrees(grown(efficient_tree, (2, 1), 3), 40, CPU)
    assert trees.depth == 2 and trees.layout(2, 2).groups == ((4, 2), (6, 2), (8, 2), (10, 2))
    assert trees.draft(CANDIDATES[:2, :2], trees.layout(2)).known_parents == (ROOT, ROOT, 0)


def test_there_may_be_more_candidates_than_a_tree_uses() -> None:
    trees = TokenTrees(grown(efficient_tree, (2, 1)), 40, CPU, widest=3)
    assert trees.draft(CANDIDATES, trees.layout(2)).token_list == [10, 11, 20]


def test_the_target_runs_a_row_for_the_last_token_every_node_and_every_probe() -> None:
    assert [tree.rows for tree in grown(efficient_tree, (2, 1), 2)] == [1 + 2, 1 + 2 + 3 * 2, 1 + 3 + 4 * 2]
    assert [tree.rows for tree in grown(efficient_tree, (2, 1))] == [1, 3, 4]


def test_trees_without_nodes_use_no_candidates_and_ask_for_no_probes_unless_told() -> None:
    assert TokenTrees(grown(full_tree, ()), 40, CPU).widest == 0
    trees = TokenTrees(grown(efficient_tree, (1,), 2), 40, CPU)
    assert (trees.layout(1).probes, trees.layout(1, 1).probes.tolist()) == (None, [40, 40])
