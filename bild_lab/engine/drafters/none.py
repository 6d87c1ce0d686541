"""No drafter: the target decodes alone, one token per forward."""

from __future__ import annotations

from bild_lab.engine.draft import Draft, Verdict, empty_draft
from bild_lab.engine.request import Request
from bild_lab.engine.session import Model, Scores, Session


class NoDraft:
    """Proposes nothing; with any acceptance rule this is ordinary autoregressive decoding."""

    drafts_trees = False

    def __init__(self, target: Model) -> None:
        self._draft = empty_draft(target.device)

    def start(self, request: Request, target: Session) -> None:
        """Nothing to prepare."""

    def propose(self, tokens: list[int]) -> Draft:
        return self._draft

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Nothing to update."""
