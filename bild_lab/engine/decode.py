"""The draft-then-verify loop, which every method that drafts and verifies goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.session import Model, Scores
from bild_lab.engine.trace import Trace, recorded_to
from bild_lab.errors import UserError, require_flag


class Drafter(Protocol):
    """Proposes tokens for the target to check.

    Text may be taken back between two proposals: to the drafter inside a `SpeculativeDrafter` it
    happens whenever the target rejects. The tokens may then be fewer than before, and the last of
    them new; all others are as they were. A draft is of the tokens it is asked to continue, whatever
    stood behind them once.
    """

    drafts_trees: bool

    def start(self, request: Request) -> None:
        """A new text."""

    def propose(self, tokens: list[int]) -> Draft:
        """A draft behind all committed tokens, the prompt included."""

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """What the target said of the draft."""


@runtime_checkable
class Prepares(Protocol):
    """A method or drafter with something to do for a request that is no part of decoding it.

    Timing calls it before the clock starts. `decode` calls it too, for requests that nobody prepared,
    so a second call for one request does nothing.
    """

    def prepare(self, request: Request) -> None: ...


class Acceptance(Protocol):
    """Decides how much of a draft stands; row 0 follows the root, row i+1 follows node i."""

    accepts_trees: bool

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict: ...


class Method(Protocol):
    """Any way to continue a prompt: returns the prompt's tokens and the emitted ones."""

    @property
    def engine(self) -> str:
        """What runs its forwards: native or hf."""

    def decode(self, request: Request, trace: Trace) -> list[int]: ...


@dataclass(frozen=True)
class DraftThenVerify:
    """A target, a drafter and an acceptance rule.

    verify_tail: check drafted tokens that end the text too. False returns them unchecked, as
    Algorithm 1 of BiLD does.
    """

    target: Model
    drafter: Drafter
    acceptance: Acceptance
    verify_tail: bool = True

    def __post_init__(self) -> None:
        require_flag("verify_tail", self.verify_tail)
        if self.drafter.drafts_trees and not self.acceptance.accepts_trees:
            raise UserError(
                f"{type(self.acceptance).__name__} accepts chains of tokens, but "
                f"{type(self.drafter).__name__} drafts trees; use ExactMatch or SpeculativeSampling with it"
            )

    @property
    def engine(self) -> str:
        return self.target.engine

    def prepare(self, request: Request) -> None:
        """Let the drafter prepare, if it is one that does."""
        if isinstance(self.drafter, Prepares):
            self.drafter.prepare(request)

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        self.prepare(request)
        with recorded_to(trace.forwards):
            return draft_then_verify(self.target, self.drafter, self.acceptance, request, trace, self.verify_tail)


def draft_then_verify(
    target: Model, drafter: Drafter, accept: Acceptance, request: Request, trace: Trace, verify_tail: bool = True
) -> list[int]:
    """Continue the prompt until an end token or the length limit; returns prompt and continuation."""
    limits = request.limits
    tokens = list(request.source.prompt)
    with trace.span("prefill"):
        session = target.start(request.source, limits.max_new_tokens)
        drafter.start(request)
    while not limits.reached(tokens):
        with trace.span("draft"):
            draft = drafter.propose(tokens)
        if not verify_tail and limits.reached(tail := limits.append(tokens, draft.token_list)):
            trace.step(draft, None)
            return tail
        with trace.span("verify"):
            scores = session.extend(*draft.under(tokens[-1]))  # the last committed token is not cached yet
            verdict = accept(draft, scores.logits[: len(draft) + 1], request)  # probes come last
        session.keep([0, *(node + 1 for node in verdict.path)])
        drafter.observe(draft, scores, verdict)
        drafted = draft.token_list
        tokens = limits.append(tokens, [*(drafted[node] for node in verdict.path), verdict.next_token])
        trace.step(draft, verdict)
    return tokens
