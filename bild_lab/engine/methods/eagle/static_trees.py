"""Trees of a fixed shape, drafted level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Tree
from bild_lab.engine.methods.candidate_trees import (
    TREE_BUILDERS,
    CandidateNode,
    branch_nodes,
    built_nodes,
    efficient_tree,
    is_tree_file,
    read_trees,
    unknown_tree,
)
from bild_lab.engine.session import OutputSpec, Rows, Session, on_device
from bild_lab.errors import UserError

DYNAMIC, CHAIN, PUBLISHED = "dynamic", "chain", "eagle_tree"
# the ranks of each branch's candidates in EAGLE-1's tree for 7B models, 25 nodes and 5 deep, which
# Figure 7 of the paper shows; one digit a rank
EAGLE_BRANCHES = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
).split()


@dataclass(frozen=True)
class TreeLevel:
    """The nodes of one depth of a static tree.

    parent_rows: [n], for each node the index of its parent among the rows that ran last.
    ranks: [n], of the nodes.
    inner: [m], which of the nodes have children, and so run.
    rows: the shape of the tree of all rows up to these; None if none runs.
    """

    parent_rows: Int[Tensor, " n"]
    ranks: Int[Tensor, " n"]
    inner: Int[Tensor, " m"]
    rows: Tree | None


@dataclass(frozen=True)
class StaticLayout:
    """A static tree down to some depth. parent_list: the nodes' parents on the host. shape: of the
    last committed token and the nodes.
    """

    levels: list[TreeLevel]
    parents: Int[Tensor, " n"]
    parent_list: list[int]
    shape: Tree


class StaticTree:
    """A tree whose shape never changes: each node is the candidate of one rank after its parent."""

    def __init__(self, nodes: Sequence[CandidateNode], device: torch.device) -> None:
        self._nodes, self._device = nodes, device
        self._width = 1 + max(node.rank for node in nodes)
        self._layout = lru_cache(maxsize=None)(self._lay_out)

    def draft(self, session: Session, feed: Sequence[int], depth: int, chain: bool) -> Draft:
        """Run these tokens of the text, then one level after the other, down to this depth."""
        layout = self._layout(depth)
        scores = session.extend(feed, OutputSpec(logits=1))
        calls = 1
        drafted: list[Tensor] = []
        for level in layout.levels:
            candidates = scores.logits.topk(self._width).indices  # [rows, width]
            level_tokens = candidates[level.parent_rows, level.ranks]
            drafted.append(level_tokens)
            if level.rows is not None:
                scores = session.extend(Rows(level_tokens[level.inner], level.rows))
                calls += 1
        tokens = torch.cat(drafted)
        if chain:
            return Draft(tokens, calls=calls)
        return Draft(
            tokens,
            layout.parents,
            calls=calls,
            shape=layout.shape,
            known_parents=layout.parent_list,
        )

    def cut(self, depth: int) -> list[CandidateNode]:
        """The nodes above this depth, level by level."""
        indices = [index for index, node in enumerate(self._nodes) if node.depth < depth]
        indices.sort(key=lambda index: self._nodes[index].depth)
        new_index = {ROOT: ROOT} | {index: new for new, index in enumerate(indices)}
        nodes = [self._nodes[index] for index in indices]
        return [replace(node, parent=new_index[node.parent]) for node in nodes]

    def _lay_out(self, depth: int) -> StaticLayout:
        nodes = self.cut(depth)
        parents = [node.parent for node in nodes]
        inner_nodes = sorted(set(parents) - {ROOT})  # these run
        row_of_node = {ROOT: ROOT} | {node: row for row, node in enumerate(inner_nodes)}
        levels: list[TreeLevel] = []
        rows_run = 0
        previous_inner = [ROOT]
        for depth_of_level in range(nodes[-1].depth + 1):
            level = [index for index, node in enumerate(nodes) if node.depth == depth_of_level]
            inner = [node for node in level if node in row_of_node]
            rows_run += len(inner)
            row_parents = [row_of_node[parents[node]] for node in inner_nodes[:rows_run]]
            parent_rows = [previous_inner.index(parents[node]) for node in level]
            levels.append(
                TreeLevel(
                    parent_rows=self._on_device(parent_rows),
                    ranks=self._on_device([nodes[node].rank for node in level]),
                    inner=self._on_device([level.index(node) for node in inner]),
                    rows=Tree(self._on_device(row_parents)) if inner else None,
                )
            )
            previous_inner = inner
        parents_on_device = self._on_device(parents)
        root = parents_on_device.new_full((1,), ROOT)
        shape = Tree(torch.cat([root, parents_on_device + 1]))
        return StaticLayout(levels, parents_on_device, parents, shape)

    def _on_device(self, numbers: list[int]) -> Tensor:
        return on_device(numbers, self._device)


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
