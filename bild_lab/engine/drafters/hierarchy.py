"""A drafter that is itself accelerated by a faster drafter: the hierarchy of speculative decoding §6."""

from __future__ import annotations

import torch
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import SpeculativeSampling
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.windows import FixedWindow
from bild_lab.engine.protocols import Drafter, Prepares
from bild_lab.engine.request import Request
from bild_lab.engine.session import EVERYTHING, Model, Scores, Session, Want, on_device, require_scores
from bild_lab.errors import UserError


class SpeculativeDrafter(Drafter):
    """Drafts up to `window` tokens with a model that is itself accelerated by a faster drafter.

    draft: the middle model, which drafts for the target. drafter: drafts for the middle model.
    window: hand over to the target after this many tokens; further tokens of the last inner round are cut.

    The inner rounds use speculative sampling, so every token has the middle model's distribution given the
    text before it. That distribution is therefore the q of each drafted token, whether it was an accepted
    inner draft or a correction, and the outer acceptance stays lossless. When the target rejects a token, the
    middle model's cache and the inner drafter both roll back to the accepted text (see
    `bild_lab.engine.protocols.Drafter`). Raises UserError for an inner drafter that drafts trees, and for one that
    reads more than the logits of the model it drafts for.
    """

    drafts_trees = False

    def __init__(self, draft: Model, drafter: Drafter, window: int) -> None:
        if drafter.drafts_trees:
            raise UserError(
                f"the inner drafter must draft chains, but {type(drafter).__name__} drafts trees; use a chain drafter"
            )
        if drafter.wants != EVERYTHING:
            raise UserError(
                f"the inner drafter must need logits alone, but {type(drafter).__name__} wants more; "
                "use it on the target itself"
            )
        require_scores(draft, "a hierarchy's middle model")
        self._model = draft
        self._drafter = drafter
        self._window = FixedWindow(window).size()
        self._accept = SpeculativeSampling()
        self._session: Session | None = None

    def prepare(self, request: Request) -> None:
        """Let the inner drafter prepare, if it is one that does."""
        if isinstance(self._drafter, Prepares):
            self._drafter.prepare(request)

    @property
    def draws_from(self) -> Model:
        return self._model

    def start(self, request: Request, target: Session) -> None:
        self._request = request
        self._session = None  # frees a compiled model's workspace for the next sequence
        self._session = self._model.start(request.source, request.limits.max_new_tokens, target.forwards, target)
        self._drafter.start(request, self._session)

    def propose(self, tokens: list[int]) -> Draft:
        limits, sampling = self._request.limits, self._request.sampling
        self._session.rollback(len(tokens) - 1)
        longest = len(tokens) + self._window
        text, probs, calls = tokens, [], 0
        while len(text) < longest and not limits.reached(text):
            emitted, scores, inner_calls = self._round(text)
            calls += 1 + inner_calls
            if not sampling.greedy:
                probs.append(sampling.probs(scores))
            text = limits.append(text, emitted)
        drafted = text[len(tokens) : longest]
        return Draft(
            tokens=on_device(drafted, self._model.device),
            probs=torch.cat(probs)[: len(drafted)] if probs else None,
            calls=calls,
        )

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Nothing to do: the next call of `propose` gets the accepted text."""

    def forget(self, length: int) -> None:
        self._session.rollback(length)
        self._drafter.forget(length)

    def _round(self, text: list[int]) -> tuple[list[int], Tensor, int]:
        """Verify one inner draft. Returns the emitted tokens, the logits of each, and the inner drafter's forwards."""
        inner = self._request.limits.fitting(self._drafter.propose(text), text)
        behind = text[self._session.length : -1]  # not cached yet: the target's token after a fully accepted draft
        rows = inner.under(text[-1])
        if behind:
            rows = torch.cat([on_device(behind, rows.device), rows])
        scores = self._session.extend(rows, Want(logits=len(inner) + 1))
        verdict = self._accept(inner, scores.logits, self._request)
        kept = len(verdict.path)
        self._session.rollback(len(text) + kept)
        self._drafter.observe(inner, scores, verdict)
        return [*inner.token_list[:kept], verdict.next_token], scores.logits[: kept + 1], inner.calls


def second_drafter(second_draft: Model) -> Model:
    """The pair's second draft model, for a drafter that needs one."""
    return second_draft
