"""Asks one drafter, and another one where the first is not confident."""

from __future__ import annotations

from dataclasses import replace

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.bita import MaskTokenDrafter
from bild_lab.engine.drafters.lookahead import LookaheadDrafter
from bild_lab.engine.protocols import Drafter, Prepares
from bild_lab.engine.request import Request
from bild_lab.engine.session import EVERYTHING, Scores, Session, Want
from bild_lab.errors import UserError, require_whole


class HybridDrafter(Drafter):
    """Drafts with the first drafter where it is confident, else with the second (SAM decoding, Hu et al., 2024, §3.3).

    The first is confident if its draft is at least `shortest` tokens deep. A drafter that copies drafts further behind
    longer matches, and a model with a stop rule as far as it is sure, so this holds for both. With 1 the second is
    asked where the first drafts nothing. Both learn from every verification what they can. Each round's statistics
    hold `second`, whether the second drafted.

    Raises UserError for drafters that read other outputs of the target than each other, and for a first drafter that
    drafts from rows of its own in the target's forward, as they would not run where the second drafts.
    """

    def __init__(self, first: Drafter, second: Drafter, shortest: int) -> None:
        require_whole("shortest", shortest, 1)
        for place, drafter in (("first", first), ("second", second)):
            if isinstance(drafter, MaskTokenDrafter) or (place == "first" and isinstance(drafter, LookaheadDrafter)):
                raise UserError(
                    f"the {place} drafter of a hybrid cannot be a {type(drafter).__name__}, which drafts from rows of "
                    "its own that run in every forward of the target; choose another"
                )
        self._first, self._second, self._shortest = first, second, shortest
        self.drafts_trees = first.drafts_trees or second.drafts_trees
        self.gives = first.gives & second.gives
        self.wants = both_wants(first.wants, second.wants)

    @property
    def _both(self) -> tuple[Drafter, Drafter]:
        return self._first, self._second

    def prepare(self, request: Request) -> None:
        """Let those prepare that do."""
        for drafter in self._both:
            if isinstance(drafter, Prepares):
                drafter.prepare(request)

    def start(self, request: Request, target: Session) -> None:
        for drafter in self._both:
            drafter.start(request, target)

    def propose(self, tokens: list[int]) -> Draft:
        self._tokens = tokens
        draft, self._asked, calls = self._first.propose(tokens), self._first, 0
        if draft.depth < self._shortest:
            calls = draft.calls
            self._first.forget(len(tokens))
            draft, self._asked = self._second.propose(tokens), self._second
        else:
            self._second.forget(len(tokens) - 1)  # as the text may have become shorter
        second = self._asked is self._second
        return replace(draft, calls=calls + draft.calls, stats={**draft.stats, "second": second})

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for drafter in self._both:
            if drafter is self._asked:
                drafter.observe(draft, scores, verdict)
                drafter.forget(len(self._tokens) + len(verdict.path))
            else:
                drafter.observe_other(self._tokens, draft, scores, verdict)

    def observe_other(self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for drafter in self._both:
            drafter.observe_other(tokens, draft, scores, verdict)

    def forget(self, length: int) -> None:
        for drafter in self._both:
            drafter.forget(length)


def both_wants(first: Want, second: Want) -> Want:
    """What serves both. Raises UserError if they want different hidden states."""
    one, other = (replace(each, head_input=False) for each in (first, second))
    if EVERYTHING not in (one, other) and one != other:
        raise UserError(
            "the drafters of a hybrid must read the same hidden states of the target, got two that differ; "
            "choose one that reads logits alone"
        )
    return replace(other if one == EVERYTHING else one, head_input=first.head_input or second.head_input)
