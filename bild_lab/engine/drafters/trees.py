"""Trees of candidates: the likeliest tokens of each position ahead, combined into branches (BiTA §3.2, Figure 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Tree
from bild_lab.errors import UserError, require_whole

MOST_NODES = 1024  # a full tree grows exponentially with its depth


@dataclass(frozen=True)
class Node:
    """A node of a tree: the candidate of this rank (from 0) at this depth (from 0). parent: a node's index or ROOT."""

    depth: int
    rank: int
    parent: int


def efficient_tree(widths: Sequence[int]) -> list[Node]:
    """Each depth's candidates, all as children of the previous depth's likeliest candidate (BiTA, Figure 5)."""
    nodes: list[Node] = []
    above = ROOT
    for depth, width in enumerate(widths):
        first = len(nodes)
        nodes += [Node(depth, rank, above) for rank in range(width)]
        above = first
    return nodes


def full_tree(widths: Sequence[int]) -> list[Node]:
    """Each depth's candidates as children of every candidate of the previous depth (BiTA §4.3.4)."""
    nodes: list[Node] = []
    above: Sequence[int] = [ROOT]
    for depth, width in enumerate(widths):
        level = [Node(depth, rank, parent) for parent in above for rank in range(width)]
        above = range(len(nodes), len(nodes) + len(level))
        nodes += level
    return nodes


Growth = Callable[[Sequence[int]], list[Node]]
GROWTHS: dict[str, Growth] = {"efficient_tree": efficient_tree, "full_tree": full_tree}


def widths_of(top_k: int | Sequence[int], depth: int, vocabulary: int) -> tuple[int, ...]:
    """The number of candidates at each depth. top_k: one number for all depths, or one for each of the first depths.

    Raises UserError for a number below 1 or above the vocabulary's size, and for more numbers than depths.
    """
    widths = [top_k] * depth if not isinstance(top_k, Sequence) else list(top_k)
    if not 1 <= len(widths) <= depth:
        raise UserError(f"top_k must give a width for 1 to {depth} depths, got {top_k!r}; give fewer, or one number")
    for width in widths:
        require_whole("top_k", width, 1)
        if width > vocabulary:
            raise UserError(f"top_k must be at most the vocabulary's {vocabulary} tokens, got {width}")
    return tuple(widths)


@dataclass(frozen=True)
class Layout:
    """A tree's nodes and the probes of its rows, on the device.

    picks: [n], each node's index into the flattened candidates. parents: [n]. probes: [p]. rows: the tree of the
    last committed token, the nodes and the probes.
    """

    picks: Int[Tensor, " n"]
    parents: Int[Tensor, " n"] | None
    probes: Int[Tensor, " p"] | None
    rows: Tree


class TokenTrees:
    """Drafts trees of one kind from candidates. Each shape is built once and then reused.

    grow: builds the nodes from widths. widths: candidates at each depth. vocabulary: the id of the first probe.
    Raises UserError for a full tree of more than MOST_NODES nodes.
    """

    def __init__(self, grow: Growth, widths: Sequence[int], vocabulary: int, device: torch.device) -> None:
        nodes, level = 0, 1
        for width in widths:  # the size of the full tree
            level *= width
            nodes += level
        if grow is full_tree and nodes > MOST_NODES:
            raise UserError(
                f"a full tree of top_k {list(widths)} has {nodes} nodes, more than {MOST_NODES}; lower top_k"
            )
        self._grow, self._widths = grow, tuple(widths)
        self._vocabulary, self._device = vocabulary, device
        self._layouts: dict[tuple[int, int, bool], Layout] = {}

    @property
    def widest(self) -> int:
        """How many candidates are needed at each depth."""
        return max(self._widths)

    @property
    def depth(self) -> int:
        return len(self._widths)

    def draft(
        self, candidates: Int[Tensor, "depth widest"] | None, depth: int, masks: int = 0, everywhere: bool = True
    ) -> Draft:
        """A draft tree of the candidates at the first `depth` positions; depth 0 gives an empty draft.

        masks: the number of probes, as a chain, below the last committed token and, if everywhere, below each node.
        """
        key = (depth, masks, everywhere)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(depth, masks, everywhere)
        layout = self._layouts[key]
        if depth == 0:
            return Draft(layout.picks, probes=layout.probes, shape=layout.rows)
        tokens = candidates.flatten().index_select(0, layout.picks)
        return Draft(tokens, layout.parents, probes=layout.probes, shape=layout.rows)

    def _lay_out(self, depth: int, masks: int, everywhere: bool) -> Layout:
        nodes = self._grow(self._widths[:depth])
        rows = [ROOT, *(node.parent + 1 for node in nodes)]
        probes: list[int] = []
        for row in range(len(nodes) + 1 if everywhere else 1):
            above = row
            for mask in range(masks):
                probes.append(self._vocabulary + mask)
                rows.append(above)
                above = len(rows) - 1

        def on_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=self._device)

        return Layout(
            picks=on_device([node.depth * self.widest + node.rank for node in nodes]),
            parents=on_device([node.parent for node in nodes]) if nodes else None,
            probes=on_device(probes) if probes else None,
            rows=Tree(on_device(rows)),
        )
