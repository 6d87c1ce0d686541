"""The target drafts for itself, from mask tokens that run in the same forward as verification (BiTA §3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.adapters.bita import BitaConfig
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.trees import GROWTHS, TokenTrees, efficient_tree, widths_of
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LoadedModel, Scores, Session
from bild_lab.errors import UserError, require_whole

STRAIGHTFORWARD = "straightforward"
DECODINGS = (*GROWTHS, STRAIGHTFORWARD)


class MaskTokenDrafter(Drafter):
    """Streamlined generation and verification (BiTA §3.2, Appendix B, Algorithm 1), for a `BitaTarget`.

    Every forward runs the last committed token, the draft, and groups of masks. Take the group after the last
    accepted token. Its mask j (from 0) predicts the token j + 2 positions ahead; the target's own next token is
    1 ahead. The likeliest tokens of each mask are the candidates of the next draft. The first forward has no
    draft, and one group after the prompt.

    decoding: efficient_tree (Figure 5) extends only each depth's likeliest candidate; full_tree extends every
    candidate. Both have a group of masks after every token. straightforward (Figure 4) drafts a chain of each
    mask's likeliest token, with a single group after the last committed token. So predictions for tokens that
    have since been accepted are lost, and the remaining ones were made without seeing those tokens.
    top_k: candidates of each mask, one number or one for each mask; straightforward always uses 1.
    adapter: its configuration; the weights are the target's.
    mask_tokens: use only this many of the adapter's masks, from the first; None: all, or as many as top_k lists.
    """

    drafts_trees = True

    def __init__(
        self,
        target: LoadedModel,
        adapter: BitaConfig,
        decoding: str,
        top_k: int | Sequence[int],
        mask_tokens: int | None = None,
    ) -> None:
        if decoding not in DECODINGS:
            raise UserError(f"decoding must be one of {', '.join(DECODINGS)}, got {decoding!r}")
        most = adapter.mask_tokens
        masks = most if mask_tokens is None else mask_tokens
        require_whole("mask_tokens", masks, 1, most, f"null uses all {most} of the adapter")
        vocabulary = target.checkpoint.config.vocab_size
        self._everywhere = decoding != STRAIGHTFORWARD
        widths = widths_of(top_k if self._everywhere else 1, masks, vocabulary)
        self._trees = TokenTrees(GROWTHS.get(decoding, efficient_tree), widths, vocabulary, target.device)

    def start(self, request: Request, target: Session) -> None:
        self._limits = request.limits
        self._candidates: Int[Tensor, "depth widest"] | None = None
        self._masks = 0  # of each group of the draft that is being verified

    def propose(self, tokens: list[int]) -> Draft:
        room = self._limits.room(tokens)
        depth = 0 if self._candidates is None else min(self._candidates.shape[0], room)
        self._masks = min(self._trees.depth, room - 1)  # the next draft cannot be deeper than this
        return self._trees.draft(self._candidates, depth, self._masks, self._everywhere)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Take the next draft's candidates from the masks after the last accepted token."""
        group = verdict.path[-1] + 1 if self._everywhere and verdict.path else 0
        accepted = 0 if self._everywhere else len(verdict.path)
        first = len(draft) + 1 + group * self._masks
        logits = scores.logits[first + accepted : first + self._masks]
        self._candidates = precise(logits).topk(self._trees.widest).indices
