"""The base of drafters that know the likeliest tokens of several positions ahead and draft a tree of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import Draft
from bild_lab.engine.drafters.tree_file import read_trees
from bild_lab.engine.drafters.trees import GROWTHS, Layout, ProbedTree, TokenTrees, grown, widths_of
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel, Session
from bild_lab.errors import UserError

AUTO, STRAIGHTFORWARD = "auto", "straightforward"


class CandidateDrafter(Drafter):
    """Drafts a tree of candidates, which do not depend on the path that leads to them.

    candidates: [depth, widest], the likeliest tokens of the positions behind the text so far; None: not known yet.
    most_depth: for how many positions there can be candidates. most_probes: how many probes can follow a row, 0 for
    drafters without probes.
    """

    drafts_trees = True

    def __init__(
        self, target: LoadedModel, most_depth: int, most_probes: int, trees: Sequence[ProbedTree] | None
    ) -> None:
        """trees: by how many positions have candidates; None: still to be fitted."""
        self.most_depth, self.most_probes = most_depth, most_probes
        self.candidates: Int[Tensor, "depth widest"] | None = None
        self._vocabulary, self._device = target.checkpoint.config.vocab_size, target.device
        self._trees = None if trees is None else TokenTrees(trees, self._vocabulary, self._device)

    @property
    def fitted(self) -> bool:
        """Whether it has trees; without them it cannot draft yet."""
        return self._trees is not None

    def drafting(self, trees: Sequence[ProbedTree], widest: int | None = None) -> Self:
        """The same drafter with other trees. widest: how many candidates to find at each depth."""
        other = copy.copy(self)
        other._trees = TokenTrees(trees, self._vocabulary, self._device, widest)
        return other

    def start(self, request: Request, target: Session) -> None:
        if self._trees is None:
            raise UserError(f"a tree is fitted by run.py alone, got tree={AUTO}; give the file that it keeps")
        self._limits = request.limits
        self.candidates = None

    def propose(self, tokens: list[int]) -> Draft:
        room, reach = self._limits.room(tokens), self._limits.reach(tokens)
        depth = 0 if self.candidates is None else min(self.candidates.shape[0], room, reach)
        # a next draft cannot be deeper than the room behind the next token, and probes follow the deepest node
        self._layout: Layout = self._trees.layout(depth, min(self.most_probes, room - 1, reach - depth))
        return self._trees.draft(self.candidates, self._layout)


def named_trees(
    tree: str, top_k: int | Sequence[int], most_depth: int, most_probes: int, vocabulary: int
) -> tuple[ProbedTree, ...] | None:
    """The trees of a kind's name or of a file; None for `auto`. Raises UserError for anything else."""
    if tree == AUTO:
        return None
    if not isinstance(tree, str) or not (tree in GROWTHS or Path(tree).expanduser().is_file()):
        kinds = [*GROWTHS, *([STRAIGHTFORWARD] if most_probes else []), AUTO]
        raise UserError(f"tree must be one of {', '.join(kinds)} or the file of a fitted tree, got {tree!r}")
    if tree in GROWTHS:
        widths = widths_of(top_k, most_depth, vocabulary)
        return grown(GROWTHS[tree], widths, min(most_probes, len(widths)))
    return read_trees(tree, most_depth, most_probes, vocabulary)
