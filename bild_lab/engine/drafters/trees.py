"""Trees of candidates: the likeliest tokens of each position ahead, put together to branches (BiTA §3.2, Figure 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Tree
from bild_lab.errors import UserError, require_whole

MOST_NODES = 1024  # a full tree grows with the power of its depth


@dataclass(frozen=True)
class Node:
    """A place in a tree: the candidate of this rank (from 0) at this depth (from 0), under this node or ROOT."""

    depth: int
    rank: int
    parent: int


def efficient_tree(widths: Sequence[int]) -> list[Node]:
    """At each depth so many candidates, all below the likeliest one of the depth before (BiTA, Figure 5)."""
    nodes: list[Node] = []
    above = ROOT
    for depth, width in enumerate(widths):
        first = len(nodes)
        nodes += [Node(depth, rank, above) for rank in range(width)]
        above = first
    return nodes


def full_tree(widths: Sequence[int]) -> list[Node]:
    """At each depth so many candidates below every one of the depth before (BiTA §4.3.4)."""
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
    """Candidates at each depth: one number for all of them, or one for each of the first depths.

    Raises UserError for a number below 1 or beyond the vocabulary, and for more depths than there are.
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

    picks: [n], each node's place among the candidates, flattened. parents: [n]. probes: [p]. rows: all of them
    below the last committed token.
    """

    picks: Int[Tensor, " n"]
    parents: Int[Tensor, " n"] | None
    probes: Int[Tensor, " p"] | None
    rows: Tree


class TokenTrees:
    """Drafts trees of one kind from candidates; each shape that comes up is laid out once.

    grow: from widths to nodes. widths: candidates at each depth. vocabulary: the id of the first probe.
    Raises UserError for a tree too large to be of use.
    """

    def __init__(self, grow: Growth, widths: Sequence[int], vocabulary: int, device: torch.device) -> None:
        nodes, level = 0, 1
        for width in widths:  # of the full tree: the largest that may be asked for
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
        """The tree of the candidates of the first `depth` positions; with depth 0 an empty draft.

        masks: how many probes, in a chain, below the last committed token and, if everywhere, below each node.
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
