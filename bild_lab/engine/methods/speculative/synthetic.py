"""A drafter with a chosen acceptance rate: it shows the speedup of a machine at any α and
window.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.session import Model, Session, on_device
from bild_lab.engine.trace import Trace
from bild_lab.errors import require_number, require_whole


class SyntheticDrafter(Drafter):
    """Drafts the target's own greedy text, with errors so that each token is accepted with a chosen
    probability.

    Acceptances are independent, as Theorem 3.8 of the speculative decoding paper assumes: a
    difference from its speedup is due to the machine. Verify with `ExactMatch`. acceptance_rate:
    the probability, in [0, 1], that a judged token is accepted, independently of the others; the
    draws depend on prompt and position alone. Drafts cost nothing: `prepare` finds the text outside
    the timed part. Raises UserError for values out of range.
    """

    greedy_only = True

    def __init__(self, target: Model, acceptance_rate: float, window: int) -> None:
        require_number(
            "a synthetic drafter's acceptance rate",
            acceptance_rate,
            0,
            1,
            remedy="1 drafts no wrong token",
        )
        self._target = target
        self._acceptance_rate = acceptance_rate
        require_whole("the draft window", window, 1)
        self._window = window
        self._known: dict[tuple[object, ...], FixedTextDrafter] = {}

    def prepare(self, request: Request) -> None:
        """Find the text to draft for this request."""
        self._drafts_for(request)

    def begin(self, request: Request, target: Session) -> None:
        self._proposals = self._drafts_for(request).start(request, target)

    def propose(self, tokens: list[int]) -> Draft:
        return self._proposals.propose(tokens)

    def _drafts_for(self, request: Request) -> FixedTextDrafter:
        """What is drafted for this request; it is found once."""
        key = (request.source.key, request.limits)
        if key not in self._known:
            self._known[key] = self._found_drafts(request)
        return self._known[key]

    def _found_drafts(self, request: Request) -> FixedTextDrafter:
        """Drafts whose right tokens the target accepts when it verifies exactly these drafts.

        In half precision a forward of several rows may break a near tie otherwise than a forward of
        one row. So the text is decoded again with the drafts made from it, until it no longer
        changes.
        """
        prompt_length = len(request.source.prompt)
        chance = np.random.default_rng(sum(request.source.key, ()))
        accepted = chance.random(request.limits.max_new_tokens) < self._acceptance_rate
        drafter: NoDraft | FixedTextDrafter = NoDraft(self._target)
        text: list[int] | None = None
        for _ in range(request.limits.max_new_tokens + 1):
            loop = DraftThenVerify(self._target, drafter, ExactMatch())
            decoded = loop.decode(request, Trace())[prompt_length:]
            if decoded == text:
                break
            text = decoded
            proposals = with_errors(text, accepted.tolist(), request.limits)
            drafter = FixedTextDrafter(on_device(proposals, self._target.device), self._window)
        return drafter


class FixedTextDrafter(Drafter):
    """Drafts a fixed text, `window` tokens at a time, whatever the target accepts."""

    def __init__(self, text: Int[Tensor, " n"], window: int) -> None:
        self._text = text
        self._window = window

    def begin(self, request: Request, target: Session) -> None:
        self._limits = request.limits

    def propose(self, tokens: list[int]) -> Draft:
        position = len(tokens) - self._limits.prompt_length
        return Draft(self._text[position : position + min(self._window, self._limits.room(tokens))])


def with_errors(text: list[int], accepted: list[bool], limits: Limits) -> list[int]:
    """The text with a wrong token, never an end token, at each position that is to be rejected."""
    possible = range(len(limits.end_tokens) + 2)  # of which two or more are no end tokens
    first_wrong, second_wrong, *_ = (token for token in possible if token not in limits.end_tokens)
    drafted = []
    for token, is_accepted in zip(text, accepted, strict=False):
        wrong_token = second_wrong if token == first_wrong else first_wrong
        drafted.append(token if is_accepted else wrong_token)
    return drafted
