"""The file of a tree that was fitted to a machine: what a drafter reads of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bild_lab.engine.draft import ROOT
from bild_lab.engine.drafters.trees import MOST_NODES, Node, ProbedTree
from bild_lab.errors import UserError

MAKE = "run.py makes one with policy.tree=auto, and prints where it keeps it"


def read_trees(path: str, most_depth: int, most_probes: int, vocabulary: int) -> tuple[ProbedTree, ...]:
    """The trees in a file that `policy.tree=auto` wrote, by how many positions have candidates.

    most_depth, most_probes: what the adapter or the heads were trained for.
    Raises UserError for another file, and for trees that the adapter or the heads cannot draft.
    """
    try:
        trees = trees_in(json.loads(Path(path).expanduser().read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} must hold trees, got a file without ({error}); {MAKE}") from error
    if not trees or len(trees) > most_depth + 1:
        raise UserError(f"{path} must hold a tree for 0 to {most_depth} depths, got {len(trees)} trees; {MAKE}")
    for depth, tree in enumerate(trees):
        most = min(most_probes, len(trees) - 1)
        require_possible(f"{path}, the tree for {depth} depths", tree, depth, most, vocabulary)
    return trees


def trees_in(content: dict[str, Any]) -> tuple[ProbedTree, ...]:
    """The trees of a file's content, which a result's facts hold too. Raises ValueError, KeyError or TypeError."""
    return tuple(tree_of(one) for one in content["trees"])


def require_possible(noun: str, tree: ProbedTree, depth: int, most_probes: int, vocabulary: int) -> None:
    """Raise UserError for a tree that is deeper, wider or more probed than its candidates are."""
    if any(node.depth >= depth or not 0 <= node.rank < vocabulary for node in tree.nodes):
        raise UserError(f"{noun}, must have nodes of depths below {depth} and ranks below {vocabulary}; {MAKE}")
    if any(not 0 <= count <= most_probes for count in tree.probes):
        raise UserError(f"{noun}, must have 0 to {most_probes} probes below a row, got {max(tree.probes)}; {MAKE}")


def tree_of(content: dict[str, Any]) -> ProbedTree:
    """The tree of an entry of the file. Raises ValueError for one that is no tree."""
    parents, ranks, probes = ([*map(_whole, content[key])] for key in ("parents", "ranks", "probes"))
    if len(parents) != len(ranks) or len(probes) != len(ranks) + 1 or len(ranks) > MOST_NODES:
        raise ValueError("parents, ranks and probes have lengths that do not fit")
    nodes: list[Node] = []
    for parent, rank in zip(parents, ranks, strict=True):
        if not ROOT <= parent < len(nodes):
            raise ValueError(f"node {len(nodes)} comes before its parent {parent}")
        nodes.append(Node(0 if parent == ROOT else nodes[parent].depth + 1, rank, parent))
    places = sorted((node.parent, node.rank) for node in nodes)
    if any(one == other for one, other in pairwise(places)):
        raise ValueError("a candidate stands twice below one node")
    return ProbedTree(tuple(nodes), tuple(probes))


def to_content(trees: Sequence[ProbedTree]) -> list[dict[str, list[int]]]:
    """The inverse of `tree_of` for all trees."""
    return [
        {
            "parents": [node.parent for node in tree.nodes],
            "ranks": [node.rank for node in tree.nodes],
            "probes": list(tree.probes),
        }
        for tree in trees
    ]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number")
    return value
