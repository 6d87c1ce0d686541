"""The target drafts for itself, from mask tokens that run in the same forward as verification (BiTA §3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from bild_lab.engine.adapters.bita import BitaConfig
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.candidates import STRAIGHTFORWARD, CandidateDrafter, named_trees
from bild_lab.engine.drafters.trees import TreeFile, efficient_tree, grown
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LoadedModel, Scores
from bild_lab.errors import require_whole


class MaskTokenDrafter(CandidateDrafter):
    """Streamlined generation and verification (BiTA §3.2, Appendix B, Algorithm 1), for a `BitaTarget`.

    Every forward runs the last committed token, the draft, and groups of masks. Take the group after the last
    accepted token. Its mask j (from 0) predicts the token j + 2 positions ahead; the target's own next token is
    1 ahead. The likeliest tokens of each mask are the candidates of the next draft. The first forward has no
    draft, and one group after the prompt.

    tree: efficient_tree (Figure 5) extends only each depth's likeliest candidate; full_tree extends every
    candidate. Both have a group of masks after every token. straightforward (Figure 4) drafts a chain of each
    mask's likeliest token, with a single group after the last committed token. So predictions for tokens that
    have since been accepted are lost, and the remaining ones were made without seeing those tokens. auto: `run.py`
    fits one, and keeps it in a file, which can be given too: it has a tree for each number of candidates, and says
    after which tokens masks run, and how many.
    top_k: candidates of each mask, one number or one for each mask; straightforward always uses 1.
    adapter: its configuration; the weights are the target's.
    mask_tokens: use only this many of the adapter's masks, from the first; None: all, or as many as there are widths.
    """

    def __init__(
        self,
        target: LoadedModel,
        adapter: BitaConfig,
        tree: TreeFile,
        top_k: int | Sequence[int],
        mask_tokens: int | None = None,
    ) -> None:
        most = adapter.mask_tokens
        masks = most if mask_tokens is None else mask_tokens
        require_whole("mask_tokens", masks, 1, most, f"null uses all {most} of the adapter")
        self._straight = tree == STRAIGHTFORWARD
        if self._straight:
            trees = grown(efficient_tree, [1] * masks, masks, everywhere=False)
        else:
            trees = named_trees(tree, top_k, masks, masks, target.checkpoint.config.vocab_size)
        super().__init__(target, masks, masks, trees)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Take the next draft's candidates from the masks after the last accepted token."""
        accepted = len(verdict.path)
        row = 0 if self._straight or not accepted else verdict.path[-1] + 1
        first, count = self._layout.groups[row]
        logits = scores.logits[first + (accepted if self._straight else 0) : first + count]
        self.candidates = precise(logits).topk(self._trees.widest).indices if self._trees.widest else None
