"""No drafter: the target decodes alone, one token per forward."""

from __future__ import annotations

from bild_lab.draft import Draft, Verdict, empty_draft
from bild_lab.models.session import Model, Scores
from bild_lab.request import Request


class NoDraft:
    """Proposes nothing; with any acceptance rule this is ordinary autoregressive decoding."""

    drafts_trees = False

    def __init__(self, target: Model) -> None:
        self._draft = empty_draft(target.device)

    def start(self, request: Request) -> None:
        """Nothing to prepare."""

    def propose(self, tokens: list[int]) -> Draft:
        return self._draft

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Nothing to update."""
