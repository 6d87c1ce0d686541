"""Drafts from heads that predict further ahead than the target's own head (Cai et al., 2023, Medusa)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.adapters.medusa import MedusaHeads
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.trees import GROWTHS, TokenTrees, widths_of
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LoadedModel, Scores, Session, Want
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError


class MedusaDrafter(Drafter):
    """A tree of the likeliest tokens of each head.

    The heads read the hidden state of the last accepted token, from which the target's own head chose the next
    token. Head i (from 0) predicts the token i + 1 positions after that one. The first round drafts nothing.

    Each head's product with its vocabulary matrix is recorded as a forward without layers. The residual
    blocks are far smaller and not recorded.

    tree: full_tree (the paper's Cartesian product) or efficient_tree (BiTA's). top_k: candidates of each head,
    one number or one for each of the first heads.
    """

    drafts_trees = True
    wants = Want(head_input=True)

    def __init__(self, target: LoadedModel, heads: MedusaHeads, tree: str, top_k: int | Sequence[int]) -> None:
        if tree not in GROWTHS:
            raise UserError(f"tree must be one of {', '.join(GROWTHS)}, got {tree!r}")
        widths = widths_of(top_k, heads.config.heads, heads.config.vocabulary)
        self._heads = heads
        self._config = target.checkpoint.config
        self._trees = TokenTrees(GROWTHS[tree], widths, heads.config.vocabulary, target.device)

    def start(self, request: Request, target: Session) -> None:
        self._limits, self._forwards = request.limits, target.forwards
        self._candidates: Int[Tensor, "depth widest"] | None = None

    def propose(self, tokens: list[int]) -> Draft:
        depth = 0 if self._candidates is None else min(self._trees.depth, self._limits.room(tokens))
        return self._trees.draft(self._candidates, depth)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Run the heads on the last accepted token for the next draft's candidates."""
        row = verdict.path[-1] + 1 if verdict.path else 0
        logits = self._heads(scores.head_input[row])[: self._trees.depth]  # [depth, vocab]
        self._forwards += [Forward(self._config, rows=0, scored=1, layers=0)] * self._heads.config.heads
        self._candidates = precise(logits).topk(self._trees.widest).indices
