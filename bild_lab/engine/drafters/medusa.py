"""Drafts from heads that predict further ahead than the target's own head (Cai et al., 2023, Medusa)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from bild_lab.engine.adapters.medusa import MedusaHeads
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.candidates import CandidateDrafter, named_trees
from bild_lab.engine.drafters.trees import TreeFile
from bild_lab.engine.models.native.cpu import PackedHeads
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel, Scores, Session, Want
from bild_lab.engine.trace import Forward


class MedusaDrafter(CandidateDrafter):
    """A tree of the likeliest tokens of each head.

    The heads read the hidden state of the last accepted token, from which the target's own head chose the next
    token. Head i (from 0) predicts the token i + 1 positions after that one. The first round drafts nothing.

    Each head's product with its vocabulary matrix is recorded as a forward without layers, that of heads with a shared
    matrix as one. The residual blocks are far smaller and not recorded. Heads beyond the tree's depth do not run.

    tree: full_tree (the paper's Cartesian product), efficient_tree (BiTA's), auto: `run.py` fits one and keeps it in a
    file, or such a file. top_k: candidates of each head, one number or one for each of the first heads; not for a file.
    """

    wants = Want(head_input=True)

    def __init__(self, target: LoadedModel, heads: MedusaHeads, tree: TreeFile, top_k: int | Sequence[int]) -> None:
        most = heads.config.heads
        super().__init__(target, most, 0, named_trees(tree, top_k, most, 0, heads.config.vocabulary))
        self._shared, self._config = heads.config.shared, target.checkpoint.config
        self._heads = lru_cache(maxsize=1)(partial(finder, target, heads))  # one for all copies of this drafter
        if not self._shared:  # a shared matrix needs the target's weights
            self._heads()

    def start(self, request: Request, target: Session) -> None:
        super().start(request, target)
        self._forwards = target.forwards

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Run the heads on the last accepted token for the next draft's candidates."""
        if not self._trees.widest:
            return
        row = verdict.path[-1] + 1 if verdict.path else 0
        depth = self._trees.depth
        self.candidates = self._heads().likeliest(scores.head_input[row], depth, self._trees.widest)
        together = depth if self._shared else 1
        self._forwards += [Forward(self._config, rows=0, scored=together, layers=0)] * (depth // together)


def finder(target: LoadedModel, heads: MedusaHeads) -> MedusaHeads | PackedHeads:
    """What finds the candidates on the target's engine."""
    if target.engine == "kernels":
        outputs = target.packed if heads.config.shared else heads.outputs
        return PackedHeads(heads.blocks, heads.biases, outputs)
    return heads.attach(target.vocabulary_weights()[1]) if heads.config.shared else heads
