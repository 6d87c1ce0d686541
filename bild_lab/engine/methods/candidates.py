"""The base of drafters that know candidates for several positions ahead, and draft a tree of them:
Medusa's heads and BiTA's masks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Tree
from bild_lab.engine.methods.candidate_trees import (
    MEDUSA_TREE,
    TREE_BUILDERS,
    ProbedTree,
    TreeFile,
    TreeLayout,
    built_nodes,
    efficient_tree,
    is_tree_file,
    medusa_trees,
    read_trees,
    trees_by_depth,
    unknown_tree,
)
from bild_lab.engine.methods.markov import AnyMarkov, markov_for_engine
from bild_lab.engine.methods.module_folder import SavedModule
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel, Session, on_device

STRAIGHTFORWARD = "straightforward"


class TokenTrees:
    """Drafts trees from candidates. Each shape is built once and then reused.

    trees: by how many positions have candidates.
    vocabulary_size: the id of the first probe.
    width: how many candidates there are at each depth; None: as many as the trees use.
    """

    def __init__(
        self,
        trees: Sequence[ProbedTree],
        vocabulary_size: int,
        device: torch.device,
        width: int | None = None,
    ) -> None:
        if width is None:
            ranks = [node.rank for tree in trees for node in tree.nodes]
            width = 1 + max(ranks, default=-1)
        self.width = width
        self.depth = len(trees) - 1
        self._trees = tuple(trees)
        self._vocabulary_size = vocabulary_size
        self._device = device
        self._layouts: dict[tuple[int, int], TreeLayout] = {}

    def layout(self, depth: int, max_probes: int = 0) -> TreeLayout:
        """The tree for candidates at `depth` positions, with at most so many probes below a row."""
        key = (depth, max_probes)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(self._trees[depth], max_probes)
        return self._layouts[key]

    def draft(
        self,
        candidates: Tensor | None,
        layout: TreeLayout,
        markov: AnyMarkov | None = None,
        last_token: int = 0,
    ) -> Draft:
        """A draft tree of the candidates [depth, width]; an empty draft without nodes.

        markov: finds each node's token after its parent, from scores [depth, vocab] in place of the
        candidates. last_token: the last committed token.
        """
        if not layout.nodes:
            return layout.draft(layout.picks)
        if markov is None:
            tokens = candidates.flatten().index_select(0, layout.picks)
        else:
            tokens = markov.draft(candidates, last_token, layout)
        return layout.draft(tokens)

    def _lay_out(self, tree: ProbedTree, max_probes: int) -> TreeLayout:
        rows = [ROOT, *(node.parent + 1 for node in tree.nodes)]  # the parent row of each row
        probes: list[int] = []
        probe_groups: list[tuple[int, int]] = []
        for row, row_probes in enumerate(tree.probes):
            count = min(row_probes, max_probes)
            probe_groups.append((len(rows), count))
            parent_row = row
            for mask in range(count):
                probes.append(self._vocabulary_size + mask)
                rows.append(parent_row)
                parent_row = len(rows) - 1

        device = self._device
        picks = [node.depth * self.width + node.rank for node in tree.nodes]
        parents = tuple(node.parent for node in tree.nodes)
        return TreeLayout(
            picks=on_device(picks, device),
            parents=on_device(parents, device) if parents else None,
            probes=on_device(probes, device) if probes else None,
            rows=Tree(on_device(rows, device)),
            probe_groups=tuple(probe_groups),
            parent_list=parents,
            nodes=tree.nodes,
        )


class CandidateDrafter(Drafter):
    """Drafts a tree of candidates. They do not depend on the path that leads to them, or with a
    Markov head on the token before them alone.

    candidates: [depth, width], the most likely tokens of the positions after the text so far; with
        a Markov head their logits without its bias, [depth, vocab], of a draft vocabulary's tokens
        where there is one; None: not known yet.
    max_depth: for how many positions there can be candidates.
    max_probes: how many probes can follow a row, 0 for drafters without probes.
    vocabulary_size: how many tokens can be candidates.
    """

    drafts_trees = True

    def __init__(
        self,
        target: LoadedModel,
        heads: SavedModule,
        tree: TreeFile,
        top_k: int | Sequence[int],
        max_depth: int,
        max_probes: int = 0,
    ) -> None:
        self.max_depth = max_depth
        self.max_probes = max_probes
        self.candidates: Tensor | None = None
        self.markov = markov_for_engine(target, heads.markov, heads.draft_vocabulary)
        self._draft_vocabulary = heads.draft_vocabulary
        self._target_size = target.checkpoint.columns
        self._device = target.device
        if self._draft_vocabulary is None:
            self.vocabulary_size = self._target_size
        else:
            self.vocabulary_size = len(self._draft_vocabulary)
        trees = named_trees(tree, top_k, max_depth, max_probes, self.vocabulary_size)
        self._trees = TokenTrees(trees, self._target_size, self._device)

    def drafting(self, trees: Sequence[ProbedTree], width: int | None = None) -> Self:
        """This drafter with other trees. width: how many candidates to find at each depth."""
        drafter = copy.copy(self)
        drafter._trees = TokenTrees(trees, self._target_size, self._device, width)
        return drafter

    def begin(self, request: Request, target: Session) -> None:
        self._limits = request.limits
        self.candidates = None

    def propose(self, tokens: list[int]) -> Draft:
        room, positions_left = self._limits.room(tokens), self._limits.positions_left(tokens)
        depth = 0
        if self.candidates is not None:
            depth = min(self.candidates.shape[0], room, positions_left)
        # a next draft cannot be deeper than the room after the next token, and probes follow the
        # deepest node
        max_probes = min(self.max_probes, room - 1, positions_left - depth)
        self._layout = self._trees.layout(depth, max_probes)
        return self._trees.draft(self.candidates, self._layout, self.markov, tokens[-1])

    def _tokens_at(self, indices: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The tokens that have these indices in the draft vocabulary."""
        if self._draft_vocabulary is None:
            return indices
        return self._draft_vocabulary.tokens[indices]


def named_trees(
    tree: str, top_k: int | Sequence[int], max_depth: int, max_probes: int, vocabulary_size: int
) -> tuple[ProbedTree, ...]:
    """The trees of this kind or file. Raises UserError for anything else."""
    if tree == STRAIGHTFORWARD and max_probes:
        return trees_by_depth(efficient_tree([1] * max_depth), max_depth, probe_nodes=False)
    if tree == MEDUSA_TREE:
        return medusa_trees(max_depth, max_probes, vocabulary_size)
    if isinstance(tree, str) and tree in TREE_BUILDERS:
        nodes = built_nodes(tree, top_k, max_depth, vocabulary_size)
        return trees_by_depth(nodes, min(max_probes, 1 + nodes[-1].depth))
    if is_tree_file(tree):
        return read_trees(tree, max_depth, max_probes, vocabulary_size)
    raise unknown_tree(
        tree, [*TREE_BUILDERS, MEDUSA_TREE, *([STRAIGHTFORWARD] if max_probes else [])]
    )
