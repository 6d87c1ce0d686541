"""A drafter that is itself accelerated by a faster one: the hierarchy of speculative decoding §6."""

from __future__ import annotations

import torch
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import SpeculativeSampling
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.windows import FixedWindow
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import Model, Scores, Session, Want, on_device
from bild_lab.errors import UserError


class SpeculativeDrafter(Drafter):
    """Drafts up to `window` tokens with a model whose own decoding a faster drafter speeds up.

    draft: the model in the middle, which drafts for the target. drafter: drafts for it.
    window: hand over to the target after so many tokens; what the last inner round emits beyond is cut.

    The inner rounds are speculative sampling, whose every token, given the text before it, is
    distributed as the model in the middle would have drawn it. So that model's distribution is the q
    of each drafted token, whether the token was an accepted inner draft or a correction, and the outer
    acceptance stays lossless. When the target rejects, the cache in the middle and the inner drafter
    both go back to the text that stands (see `bild_lab.engine.protocols.Drafter`). Raises UserError for an inner
    drafter of trees.
    """

    drafts_trees = False

    def __init__(self, draft: Model, drafter: Drafter, window: int) -> None:
        if drafter.drafts_trees:
            raise UserError(
                f"the inner drafter must draft chains, but {type(drafter).__name__} drafts trees; use a chain drafter"
            )
        self._model = draft
        self._drafter = drafter
        self._window = FixedWindow(window).size()
        self._accept = SpeculativeSampling()
        self._session: Session | None = None

    def start(self, request: Request, target: Session) -> None:
        self._request = request
        self._session = None  # a compiled model's memory serves the next sequence again
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
        """Nothing to do before the next draft, whose tokens say what stands."""

    def _round(self, text: list[int]) -> tuple[list[int], Tensor, int]:
        """One draft of the inner drafter, verified: the tokens emitted, the logits of each, the inner forwards."""
        inner = self._drafter.propose(text)
        behind = text[self._session.length : -1]  # what the target said, after a draft that stood whole
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
    """The pair's second draft model, for a part that drafts with one."""
    return second_draft
