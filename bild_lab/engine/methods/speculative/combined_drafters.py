"""Drafters made of drafters: a hierarchy (speculative decoding §6), and a hybrid that asks a second
one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict, empty_draft
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import (
    ALL_LOGITS,
    Model,
    OutputSpec,
    Scores,
    Session,
    for_draft,
    merged_outputs,
    on_device,
)
from bild_lab.engine.vocabularies.intersection import WithinPositions
from bild_lab.errors import UserError, require_whole


class SpeculativeDrafter(Drafter):
    """Drafts up to `window` tokens with a model that is itself accelerated by a faster drafter.

    draft: the middle model, which drafts for the target.
    drafter: drafts for the middle model.
    window: hand over to the target after this many tokens; further tokens of the last inner round
        are cut.

    The inner rounds use speculative sampling, so every token has the middle model's distribution
    given the text before it. That distribution is therefore the q of each drafted token, whether it
    was an accepted inner draft or a correction, and the outer acceptance stays lossless. When the
    target rejects a token, the middle model's cache and the inner drafter both roll back to the
    accepted text (see `bild_lab.engine.protocols.Drafter`). Where the positions of a middle model
    of another vocabulary end, it drafts nothing. Raises UserError for an inner drafter that drafts
    trees, and for one that reads more than the logits of the model it drafts for.
    """

    def __init__(self, draft: Model, drafter: Drafter, window: int) -> None:
        if drafter.drafts_trees:
            raise UserError(
                f"the inner drafter must draft chains, but {type(drafter).__name__} drafts trees;"
                " use a chain drafter"
            )
        if drafter.required_outputs != ALL_LOGITS:
            raise UserError(
                f"the inner drafter must need logits alone, but {type(drafter).__name__} wants"
                " more; use it on the target itself"
            )
        self._model = draft
        self._drafter = drafter
        self.greedy_only, self.learns_from_texts = drafter.greedy_only, drafter.learns_from_texts
        require_whole("the draft window", window, 1)
        self._window = window
        self._accept = SpeculativeSampling()

    def prepare(self, request: Request) -> None:
        self._drafter.prepare(request)

    def forget(self) -> None:
        self._drafter.forget()

    def begin(self, request: Request, target: Session) -> None:
        self._request = request
        self._session = self._model.start(
            request.source, request.limits.max_new_tokens, for_draft(target)
        )
        self._drafter = self._drafter.start(request, self._session)

    def propose(self, tokens: list[int]) -> Draft:
        limits, sampling = self._request.limits, self._request.sampling
        self._session.rollback(len(tokens) - 1)
        longest = len(tokens) + self._window
        text, probs, calls = tokens, [], 0
        while len(text) < longest and not limits.reached(text):
            room = self._room(text)
            if room is not None and room < 0:
                break
            emitted, scores, inner_calls = self._round(text, room)
            calls += 1 + inner_calls
            if not sampling.greedy:
                probs.append(sampling.probs(scores))
            text = limits.append(text, emitted)
        drafted = text[len(tokens) : longest]
        return Draft(
            tokens=on_device(drafted, self._model.device),
            probs=torch.cat(probs)[: len(drafted)] if probs else None,
            calls=calls,
            drawn_from=self._model,
        )

    def rollback(self, length: int) -> None:
        self._session.rollback(length)
        self._drafter.rollback(length)

    def _room(self, text: list[int]) -> int | None:
        """How many tokens of the inner drafter the middle model has positions for after the text.

        The text alone decides it: where drafted tokens did, those that are left would have another
        distribution than q.
        """
        session = self._session
        if not isinstance(session, WithinPositions):
            return None
        return session.room(text[session.length :])

    def _round(self, text: list[int], room: int | None) -> tuple[list[int], Tensor, int]:
        """Verify one inner draft, of at most `room` tokens.

        Returns the emitted tokens, the logits of each, and the inner drafter's forwards.
        """
        inner = self._drafter.propose(text)
        inner = inner.up_to_depth(self._request.limits.positions_left(text))
        if room is not None:
            inner = inner.up_to_depth(room)
        rows = inner.row_tokens(text[-1])
        # the target's token after a fully accepted draft
        uncached_tokens = text[self._session.length : -1]
        if uncached_tokens:
            rows = torch.cat([on_device(uncached_tokens, rows.device), rows])
        scores = self._session.extend(rows, OutputSpec(logits=len(inner) + 1))
        verdict = self._accept(inner, scores.logits, self._request)
        accepted_count = len(verdict.path)
        self._session.rollback(len(text) + accepted_count)
        self._drafter.observe(inner, scores, verdict)
        return verdict.tokens(inner), scores.logits[: accepted_count + 1], inner.calls


def second_drafter(second_draft: Model) -> Model:
    """The pair's second draft model, for a drafter that needs one."""
    return second_draft


class HybridDrafter(Drafter):
    """Drafts with the first drafter where it is confident, else with the second (SAM decoding, Hu
    et al., 2024, §3.3).

    The first is confident if its draft is at least `min_depth` tokens deep. A drafter that copies
    drafts further after longer matches, and a model with a stop rule as far as it is sure, so this
    holds for both. With 1 the second is asked where the first drafts nothing. A draft of tokens
    that were drawn is always verified: how deep it is may depend on them, and those that are left
    after dropping some would have another distribution than q. Both learn from every verification
    what they can. Each round's statistics hold `second`, whether the second drafted.

    Where one reads the target's states of the prompt, and the other runs layers of the target, the
    first round drafts nothing: those states come out of its verification, and of no other, if the
    prompt has run before.

    Raises UserError for drafters that read other outputs of the target than each other, and for a
    first drafter that drafts from rows of its own in the target's forward, as they would not run
    where the second drafts.
    """

    def __init__(self, first: Drafter, second: Drafter, min_depth: int) -> None:
        require_whole("min_depth", min_depth, 1)
        for place, drafter in (("first", first), ("second", second)):
            if place not in drafter.hybrid_places:
                raise UserError(
                    f"the {place} drafter of a hybrid cannot be a {type(drafter).__name__}, which"
                    " drafts from rows of its own that run in every forward of the target; choose"
                    " another"
                )
        self._first, self._second, self._min_depth = first, second, min_depth
        self.drafts_trees = first.drafts_trees or second.drafts_trees
        self.greedy_only = first.greedy_only or second.greedy_only
        self.learns_from_texts = first.learns_from_texts or second.learns_from_texts
        self.runs_target_layers = first.runs_target_layers or second.runs_target_layers
        self.gives = first.gives & second.gives
        self.required_outputs = merged_outputs(first.required_outputs, second.required_outputs)

    @property
    def _both(self) -> tuple[Drafter, Drafter]:
        return self._first, self._second

    def prepare(self, request: Request) -> None:
        for drafter in self._both:
            drafter.prepare(request)

    def forget(self) -> None:
        for drafter in self._both:
            drafter.forget()

    def begin(self, request: Request, target: Session) -> None:
        self._first, self._second = (drafter.start(request, target) for drafter in self._both)
        self._device = request.source.device
        has_rows_before = len(request.source.prompt) > 1
        self._awaits_prompt = (
            has_rows_before and self.required_outputs.prompt and self.runs_target_layers
        )

    def propose(self, tokens: list[int]) -> Draft:
        self._tokens = tokens
        if self._awaits_prompt:
            self._asked = None
            return replace(empty_draft(self._device), stats={"second": False})
        draft = self._first.propose(tokens)
        calls = draft.calls
        asks_second = not self._is_confident(draft)
        if asks_second:
            self._first.rollback(len(tokens))
            draft = self._second.propose(tokens)
            calls += draft.calls
        else:
            self._second.rollback(len(tokens) - 1)  # the text may have become shorter
        self._asked = self._second if asks_second else self._first
        return replace(draft, calls=calls, stats={**draft.stats, "second": asks_second})

    def _is_confident(self, draft: Draft) -> bool:
        was_drawn = draft.probs is not None
        return draft.depth >= (1 if was_drawn else self._min_depth)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self._awaits_prompt = False
        for drafter in self._both:
            if drafter is self._asked:
                drafter.observe(draft, scores, verdict)
                drafter.rollback(len(self._tokens) + len(verdict.path))
            else:
                drafter.observe_other(self._tokens, draft, scores, verdict)

    def observe_other(
        self, tokens: list[int], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        self._awaits_prompt = False
        for drafter in self._both:
            drafter.observe_other(tokens, draft, scores, verdict)

    def rollback(self, length: int) -> None:
        for drafter in self._both:
            drafter.rollback(length)
