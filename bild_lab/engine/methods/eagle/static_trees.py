"""Trees of a fixed shape, drafted level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bild_lab.engine.draft import ROOT, Draft
from bild_lab.engine.methods.candidate_trees import (
    TREE_BUILDERS,
    CandidateNode,
    branch_nodes,
    built_nodes,
    efficient_tree,
    is_tree_file,
    read_trees,
    trees_by_depth,
    unknown_tree,
)
from bild_lab.engine.methods.candidates import TokenTrees
from bild_lab.engine.session import OutputSpec, Rows, Session
from bild_lab.errors import UserError

DYNAMIC, CHAIN, PUBLISHED = "dynamic", "chain", "eagle_tree"
# the ranks of each branch's candidates in EAGLE-1's tree for 7B models, 25 nodes and 5 deep, which
# Figure 7 of the paper shows; one digit a rank
EAGLE_BRANCHES = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
).split()


class StaticTree:
    """A tree whose shape never changes: each node is the candidate of one rank after its parent."""

    def __init__(self, nodes: Sequence[CandidateNode], device: torch.device) -> None:
        self._trees = TokenTrees(trees_by_depth(level_by_level(nodes)), 0, device)

    def draft(self, session: Session, feed: Sequence[int], depth: int, chain: bool) -> Draft:
        """Run these tokens of the text, then one level after the other, down to this depth."""
        layout = self._trees.layout(min(depth, self._trees.depth))
        tokens = layout.picks.new_empty(1 + len(layout.nodes))  # the first is the text's last
        scores = session.extend(feed, OutputSpec(logits=1))
        for level, parents in zip(layout.levels, [None, *layout.trees_of_parents], strict=True):
            if parents is not None:
                scores = session.extend(Rows(tokens[level.parent_rows], parents))
            candidates = scores.logits.topk(self._trees.width).indices[:, : level.width]
            tokens[level.rows] = candidates.flatten()[level.picks]
        drafted, calls = tokens[1:], len(layout.levels)
        return Draft(drafted, calls=calls) if chain else layout.draft(drafted, calls)


def level_by_level(nodes: Sequence[CandidateNode]) -> list[CandidateNode]:
    """The same nodes, sorted by their depth."""
    order = sorted(range(len(nodes)), key=lambda index: nodes[index].depth)
    new_index = {ROOT: ROOT} | {index: new for new, index in enumerate(order)}
    return [replace(nodes[index], parent=new_index[nodes[index].parent]) for index in order]


def named_nodes(
    tree: str, top_k: int | Sequence[int], window: int, vocabulary: int
) -> Sequence[CandidateNode] | None:
    """The nodes of a static tree down to this depth; None for a dynamic one.

    Raises UserError for anything else.
    """
    if tree == DYNAMIC:
        return None
    if tree == CHAIN:
        return efficient_tree([1] * window)
    if tree == PUBLISHED:
        return branch_nodes(EAGLE_BRANCHES)
    if isinstance(tree, str) and tree in TREE_BUILDERS:
        return built_nodes(tree, top_k, window, vocabulary)
    if not is_tree_file(tree):
        raise unknown_tree(tree, [DYNAMIC, CHAIN, PUBLISHED, *TREE_BUILDERS])
    if not (nodes := read_trees(tree, window, 0, vocabulary)[-1].nodes):
        raise UserError(
            f"{tree} has no tree with nodes; give another file, or one of {DYNAMIC}, {PUBLISHED}"
        )
    return nodes
