"""Trees of candidates: the most likely tokens of each position ahead, combined into branches (BiTA
§3.2, Figure 5).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Tree
from bild_lab.engine.session import on_device
from bild_lab.errors import UserError, require_whole
from bild_lab.files import NamesFile

MAX_NODES = 1024  # a full tree grows exponentially with its depth
# the tree of Medusa's authors for the heads that they released for Vicuna, 63 nodes of mc_sim_7b_63
# in medusa/model/medusa_choices.py: the ranks of each branch's candidates, one digit a rank
MEDUSA_TREE = "mc_sim_7b_63"
MEDUSA_BRANCHES = (
    "0 1 2 3 4 5 6 7 8 9"
    " 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90"
    " 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200"
    " 0000 0001"
).split()


@dataclass(frozen=True)
class CandidateNode:
    """A node of a tree: the candidate of this rank (from 0) at this depth (from 0). parent: a
    node's index or ROOT.
    """

    depth: int
    rank: int
    parent: int


def efficient_tree(widths: Sequence[int]) -> list[CandidateNode]:
    """Each depth's candidates, all as children of the previous depth's most likely candidate (BiTA,
    Figure 5).
    """
    nodes: list[CandidateNode] = []
    parent = ROOT
    for depth, width in enumerate(widths):
        first_child = len(nodes)
        nodes += [CandidateNode(depth, rank, parent) for rank in range(width)]
        parent = first_child
    return nodes


def narrowing_tree(widths: Sequence[int]) -> list[CandidateNode]:
    """An efficient tree with one candidate fewer at each depth: 5, 4, 3 where 5 are asked for.

    Source: BiTA's released evaluation (tree_type upper-triangle in `decode_alg_mask_tree2` of
    tests/eval_infer.py); the paper states the top 5 of every mask (§4.1.2). Raises UserError where
    a depth would have no candidate.
    """
    if wrong := [width for depth, width in enumerate(widths) if width <= depth]:
        raise UserError(
            f"a narrowing_tree has one candidate fewer at each of its {len(widths)} depths, got"
            f" top_k {wrong[0]}; give at least {len(widths)}, or tree=efficient_tree"
        )
    return efficient_tree([width - depth for depth, width in enumerate(widths)])


def full_tree(widths: Sequence[int]) -> list[CandidateNode]:
    """Each depth's candidates as children of every candidate of the previous depth (BiTA
    §4.3.4). Raises UserError for more than MAX_NODES nodes.
    """
    count = sum(accumulate(widths, mul))
    if count > MAX_NODES:
        raise UserError(
            f"a full tree of top_k {list(widths)} has {count} nodes, more than {MAX_NODES}; lower"
            " top_k, or draft less far ahead"
        )
    nodes: list[CandidateNode] = []
    parents: Sequence[int] = [ROOT]
    for depth, width in enumerate(widths):
        level = [CandidateNode(depth, rank, parent) for parent in parents for rank in range(width)]
        parents = range(len(nodes), len(nodes) + len(level))
        nodes += level
    return nodes


def branch_nodes(branches: Sequence[str]) -> list[CandidateNode]:
    """The nodes of a tree whose branches are texts, one digit a rank, each after its parent."""
    node_of_branch = {"": ROOT} | {branch: node for node, branch in enumerate(branches)}
    return [
        CandidateNode(len(branch) - 1, int(branch[-1]), node_of_branch[branch[:-1]])
        for branch in branches
    ]


TreeBuilder = Callable[[Sequence[int]], list[CandidateNode]]
TREE_BUILDERS: dict[str, TreeBuilder] = {
    "efficient_tree": efficient_tree,
    "full_tree": full_tree,
    "narrowing_tree": narrowing_tree,
}
TreeFile = Annotated[
    str,
    NamesFile((*TREE_BUILDERS, MEDUSA_TREE, "straightforward", "chain", "dynamic", "eagle_tree")),
]


def candidate_widths(top_k: int | Sequence[int], depth: int, vocabulary: int) -> tuple[int, ...]:
    """The number of candidates at each depth. top_k: one number for all depths, or one for each of
    the first depths.

    Raises UserError for a number below 1 or above the vocabulary's size, and for more numbers than
    depths.
    """
    widths = list(top_k) if isinstance(top_k, Sequence) else [top_k] * depth
    if not 1 <= len(widths) <= depth:
        raise UserError(
            f"top_k must give a width for 1 to {depth} depths, got {top_k!r}; give fewer, or one"
            " number"
        )
    for width in widths:
        require_whole("top_k", width, 1, vocabulary, f"the vocabulary has {vocabulary} tokens")
    return tuple(widths)


@dataclass(frozen=True)
class ProbedTree:
    """A tree of candidates and the probes of its rows.

    nodes: each after its parent. probes: [n + 1], how many probes follow the last committed token
    and each node.
    """

    nodes: tuple[CandidateNode, ...]
    probes: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many rows the target runs: the last committed token, the nodes and the probes."""
        return 1 + len(self.nodes) + sum(self.probes)


def built_nodes(
    tree: str, top_k: int | Sequence[int], depth: int, vocabulary: int
) -> list[CandidateNode]:
    """The nodes of a tree of `TREE_BUILDERS`. Raises UserError for widths that cannot be."""
    return TREE_BUILDERS[tree](candidate_widths(top_k, depth, vocabulary))


def is_tree_file(tree: Any) -> bool:
    return isinstance(tree, str) and Path(tree).expanduser().is_file()


def unknown_tree(tree: Any, kinds: Sequence[str]) -> UserError:
    """The refusal of a tree that is none of these kinds, and no file."""
    return UserError(
        f"tree must be one of {', '.join(kinds)} or the file of a fitted tree, got {tree!r}"
    )


def trees_by_depth(
    nodes: Sequence[CandidateNode], probes: int = 0, probe_nodes: bool = True
) -> tuple[ProbedTree, ...]:
    """A tree, whose nodes come level by level, cut by how many positions have candidates: from none
    to all.

    probes: how many follow the last committed token and, with probe_nodes, each node.
    """
    depth = 1 + max((node.depth for node in nodes), default=-1)
    trees = []
    for positions in range(depth + 1):
        upper_nodes = tuple(node for node in nodes if node.depth < positions)
        probes_of_node = probes if probe_nodes else 0
        trees.append(ProbedTree(upper_nodes, (probes, *[probes_of_node] * len(upper_nodes))))
    return tuple(trees)


def medusa_trees(max_depth: int, max_probes: int, vocabulary: int) -> tuple[ProbedTree, ...]:
    """The trees of Medusa's authors, by how many positions have candidates.

    max_depth, max_probes: what the heads or the adapter were trained for. Raises UserError for fewer
    depths or tokens than the tree has.
    """
    nodes = branch_nodes(MEDUSA_BRANCHES)
    depth = 1 + max(node.depth for node in nodes)
    width = 1 + max(node.rank for node in nodes)
    if max_depth < depth or vocabulary < width:
        raise UserError(
            f"{MEDUSA_TREE} takes the {width} most likely tokens of {depth} positions ahead, got"
            f" {vocabulary} tokens and {max_depth} positions; choose another policy.tree"
        )
    return trees_by_depth(nodes, min(max_probes, depth))


@dataclass(frozen=True)
class CandidateLevel:
    """The nodes of one depth, for candidates that depend on their parent.

    parent_rows: [p], the rows of the nodes' parents, each once.
    picks: [n], each node's index into the flattened candidates of these parents.
    rows: [n], of the nodes.
    width: how many candidates a parent has.
    """

    parent_rows: Int[Tensor, " p"]
    picks: Int[Tensor, " n"]
    rows: Int[Tensor, " n"]
    width: int


@dataclass(frozen=True)
class TreeLayout:
    """A tree's nodes and the probes of its rows, on the device.

    picks: [n], each node's index into the flattened candidates.
    parents: [n].
    probes: [p].
    rows: the tree of the last committed token, the nodes and the probes.
    probe_groups: for each row the row of its first probe, and how many probes it has.
    nodes, parent_list: the nodes and their parents on the host.
    """

    picks: Int[Tensor, " n"]
    parents: Int[Tensor, " n"] | None
    probes: Int[Tensor, " p"] | None
    rows: Tree
    probe_groups: tuple[tuple[int, int], ...]
    parent_list: tuple[int, ...]
    nodes: tuple[CandidateNode, ...]

    def draft(self, tokens: Int[Tensor, " n"], calls: int = 0) -> Draft:
        """The draft with these tokens at its nodes. calls: as in `Draft`."""
        return Draft(
            tokens,
            self.parents,
            calls=calls,
            probes=self.probes,
            shape=self.rows,
            known_parents=self.parent_list,
        )

    @cached_property
    def levels(self) -> list[CandidateLevel]:
        """The nodes by depth."""
        depth = 1 + max(node.depth for node in self.nodes)
        return [self._level(level) for level in range(depth)]

    def _level(self, depth: int) -> CandidateLevel:
        device = self.picks.device
        indices = [index for index, node in enumerate(self.nodes) if node.depth == depth]
        nodes = [self.nodes[index] for index in indices]
        parents = sorted({node.parent for node in nodes})
        width = 1 + max(node.rank for node in nodes)
        picks = [parents.index(node.parent) * width + node.rank for node in nodes]
        return CandidateLevel(
            parent_rows=on_device([parent + 1 for parent in parents], device),
            picks=on_device(picks, device),
            rows=on_device([index + 1 for index in indices], device),
            width=width,
        )

    @cached_property
    def trees_of_parents(self) -> list[Tree]:
        """For each level but the first, the tree of all nodes with children above it: the rows that
        a drafter runs level by level.
        """
        parents = sorted(set(self.parent_list) - {ROOT})
        row_of_node = {ROOT: ROOT} | {node: row for row, node in enumerate(parents)}
        rows = [row_of_node[self.parent_list[node]] for node in parents]
        counts = accumulate(len(level.parent_rows) for level in self.levels[1:])
        return [Tree(on_device(rows[:count], self.picks.device)) for count in counts]

    @cached_property
    def kernel_nodes(self) -> Int[Tensor, "3 n"]:
        """The nodes' parents, depths and ranks, as the kernels read them."""
        columns = [[node.parent, node.depth, node.rank] for node in self.nodes]
        return torch.tensor(columns, dtype=torch.int32).T.contiguous()


MAKE_TREES = "scripts/fit_tree.py makes one"


def read_trees(
    path: str, max_depth: int, max_probes: int, vocabulary: int
) -> tuple[ProbedTree, ...]:
    """The trees in a file of `scripts/fit_tree.py`, by how many positions have candidates.

    max_depth, max_probes: what the adapter or the heads were trained for.
    Raises UserError for another file, and for trees that the adapter or the heads cannot draft.
    """
    try:
        trees = trees_from_content(json.loads(Path(path).expanduser().read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} must hold trees, got a file without ({error}); {MAKE_TREES}"
        ) from error
    if not trees or len(trees) > max_depth + 1:
        raise UserError(
            f"{path} must hold a tree for 0 to {max_depth} depths, got {len(trees)} trees; {MAKE_TREES}"
        )
    for depth, tree in enumerate(trees):
        max_row_probes = min(max_probes, len(trees) - 1)
        require_draftable(
            f"{path}, the tree for {depth} depths", tree, depth, max_row_probes, vocabulary
        )
    return trees


def trees_from_content(content: dict[str, Any]) -> tuple[ProbedTree, ...]:
    """The trees of a file's content, which a result's facts hold too.

    Raises ValueError, LookupError or TypeError.
    """
    return tuple(tree_from_content(tree) for tree in content["trees"])


def require_draftable(
    noun: str, tree: ProbedTree, depth: int, max_probes: int, vocabulary: int
) -> None:
    """Raise UserError for a tree that is deeper, wider or more probed than its candidates are."""
    if any(node.depth >= depth or not 0 <= node.rank < vocabulary for node in tree.nodes):
        raise UserError(
            f"{noun}, must have nodes of depths below {depth} and ranks below {vocabulary}; {MAKE_TREES}"
        )
    if any(not 0 <= count <= max_probes for count in tree.probes):
        raise UserError(
            f"{noun}, must have 0 to {max_probes} probes below a row, got {max(tree.probes)};"
            f" {MAKE_TREES}"
        )


def tree_from_content(content: dict[str, Any]) -> ProbedTree:
    """The tree of an entry of the file. Raises ValueError or IndexError for one that is no tree."""
    parents, ranks, probes = content["parents"], content["ranks"], content["probes"]
    if len(probes) != len(ranks) + 1 or len(ranks) > MAX_NODES:
        raise ValueError("parents, ranks and probes have lengths that do not fit")
    nodes: list[CandidateNode] = []
    for parent, rank in zip(parents, ranks, strict=True):
        depth = 0 if parent == ROOT else nodes[parent].depth + 1
        nodes.append(CandidateNode(depth, rank, parent))
    return ProbedTree(tuple(nodes), tuple(probes))


def trees_to_content(trees: Sequence[ProbedTree]) -> list[dict[str, list[int]]]:
    """The inverse of `trees_from_content`."""
    return [
        {
            "parents": [node.parent for node in tree.nodes],
            "ranks": [node.rank for node in tree.nodes],
            "probes": list(tree.probes),
        }
        for tree in trees
    ]
