"""A drafter whose acceptance rate is chosen: what speedup a machine would give at any α and window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.acceptance.exact_match import ExactMatch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.drafters.none import NoDraft
from bild_lab.engine.drafters.windows import FixedWindow
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import LAST, Model, Session, on_device
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError


class SyntheticDrafter(Drafter):
    """Drafts the target's own greedy text, spoiled so that each token is accepted with a chosen probability.

    Theorem 3.8 of the speculative decoding paper predicts a speedup from α, the window and the cost
    ratio; with the acceptance rate set and its events independent, as the theorem assumes, what is
    measured beside it is the machine. Verify with `ExactMatch`.

    acceptance_rate: the probability, in [0, 1], with which each drafted token that is judged stands,
    independently of the others. A token that shall not stand is replaced by one that the target does
    not choose. The chances hang on the prompt and the position alone: repeats do the same work, and
    what stands at one rate stands at every higher one.
    draft: a model that runs one row for every drafted token, with its cache rolled back as
    `ModelDrafter` does, and whose choices are thrown away: the cost of a real drafter. None drafts
    at no cost.

    The text is found by `prepare`, outside the clock, and kept for repeats. Raises UserError for values
    out of range, or where tokens are sampled, as there is no one text to draft then.
    """

    drafts_trees = False

    def __init__(self, target: Model, acceptance_rate: float, window: int, draft: Model | None = None) -> None:
        if not isinstance(acceptance_rate, int | float) or not 0.0 <= acceptance_rate <= 1.0:
            raise UserError(
                f"a synthetic drafter's acceptance rate must lie in [0, 1], got {acceptance_rate!r}; "
                "1 drafts no wrong token"
            )
        self._target = target
        self._acceptance_rate = acceptance_rate
        self._window = FixedWindow(window).size()
        self._model = draft
        self._session: Session | None = None
        self._request: Request | None = None
        self._known: dict[tuple[object, ...], Recital] = {}

    def prepare(self, request: Request) -> None:
        """Find what to draft for this request, unless it is known."""
        if request is self._request:  # to compare its tokens would wait for a GPU
            return
        if not request.sampling.greedy:
            raise UserError(
                "a synthetic drafter drafts the target's greedy text, got decoding.temperature="
                f"{request.sampling.temperature}; use decoding=greedy"
            )
        key = (*source_tokens(request.source), request.limits)
        if key not in self._known:
            self._known[key] = self._recital(request)
        self._request, self._proposals = request, self._known[key]

    def start(self, request: Request, target: Session) -> None:
        self._proposals.start(request, target)
        if self._model is not None:
            self._session = None  # a compiled model's memory serves the next sequence again
            self._session = self._model.start(request.source, request.limits.max_new_tokens, target.forwards, target)

    def propose(self, tokens: list[int]) -> Draft:
        draft = self._proposals.propose(tokens)
        if self._model is None:
            return draft
        self._session.rollback(len(tokens) - 1)
        feed: list[int] | Tensor = tokens[self._session.length :]
        for token in draft.tokens[:, None]:
            logits = self._session.extend(feed, LAST).logits
            self._request.sampling.choose(logits, None)  # for what choosing costs
            feed = token
        return replace(draft, calls=len(draft))

    def _recital(self, request: Request) -> Recital:
        """Drafts that the target, verifying these very drafts, accepts where they are not spoiled.

        In half precision a forward of several rows may choose otherwise than one of a single row where
        two tokens nearly tie, and an unspoiled draft would be rejected. So the text is decoded again
        with the drafts made from it, until it comes out as it went in. Every pass agrees further
        than the one before; in float32 the first one does throughout.
        """
        start, chance = len(request.source.prompt), np.random.default_rng(sum(source_tokens(request.source), ()))
        stands = chance.random(request.limits.max_new_tokens) < self._acceptance_rate
        drafter: NoDraft | Recital = NoDraft(self._target)
        text: list[int] | None = None
        for _ in range(request.limits.max_new_tokens + 1):
            found = DraftThenVerify(self._target, drafter, ExactMatch()).decode(request, Trace())[start:]
            if found == text:
                break
            text = found
            proposals = spoiled(text, stands.tolist(), request.limits)
            drafter = Recital(on_device(proposals, self._target.device), self._window)
        return drafter


class Recital(Drafter):
    """Drafts a text known beforehand, `window` tokens at a time, whatever the target says of it."""

    drafts_trees = False

    def __init__(self, text: Int[Tensor, " n"], window: int) -> None:
        self._text = text
        self._window = window

    def start(self, request: Request, target: Session) -> None:
        self._limits = request.limits

    def propose(self, tokens: list[int]) -> Draft:
        position = len(tokens) - self._limits.prompt_length
        return Draft(self._text[position : position + min(self._window, self._limits.room(tokens))])


def source_tokens(source: Source) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that a text starts from: the prompt's, and the encoder's."""
    return source.prompt, () if source.encoder_ids is None else tuple(source.encoder_ids[0].tolist())


def spoiled(text: list[int], stands: list[bool], limits: Limits) -> list[int]:
    """The text with another token in each place that shall not stand; never one that ends a text."""
    others = [token for token in range(len(limits.end_tokens) + 2) if token not in limits.end_tokens]
    return [token if kept else next(o for o in others if o != token) for token, kept in zip(text, stands, strict=False)]
