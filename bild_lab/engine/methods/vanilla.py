"""No drafter: the target decodes alone, one token per forward."""

from __future__ import annotations

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, empty_draft
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.session import Model


class NoDraft(Drafter):
    """Proposes nothing; with any acceptance rule this is ordinary autoregressive decoding."""

    drafts_nothing = True

    def __init__(self, target: Model) -> None:
        self._draft = empty_draft(target.device)

    def propose(self, tokens: list[int]) -> Draft:
        return self._draft


def target_alone(target: Model) -> DraftThenVerify:
    """The target's own text: after each token the most likely one."""
    return DraftThenVerify(target, NoDraft(target), ExactMatch())
