"""The draft-then-verify loop that all drafting methods share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bild_lab.engine.protocols import Acceptance, Drafter, Prepares, ReadsRound
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import Feed, Model, Rows
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError, require_flag


@dataclass(frozen=True)
class DraftThenVerify:
    """A target, a drafter and an acceptance rule.

    verify_tail: also verify drafted tokens that end the text. False returns them unverified, as
    Algorithm 1 of BiLD does. Raises UserError for parts that do not fit together.
    """

    target: Model
    drafter: Drafter
    acceptance: Acceptance
    verify_tail: bool = True

    def __post_init__(self) -> None:
        require_flag("verify_tail", self.verify_tail)
        rule, drafter = type(self.acceptance).__name__, type(self.drafter).__name__
        if self.drafter.drafts_trees and not self.acceptance.accepts_trees:
            raise UserError(
                f"{rule} accepts chains of tokens, but {drafter} drafts trees; "
                "use ExactMatch or SpeculativeSampling with it"
            )
        if lacking := sorted(self.acceptance.needs - self.drafter.gives):
            raise UserError(
                f"{rule} needs the {lacking[0]} of every draft, which {drafter} does not give here; "
                "draft with ModelDrafter and keeps_probs: true"
            )

    @property
    def engine(self) -> str:
        return self.target.engine

    @property
    def feeds(self) -> Feed:
        if self.drafter.drafts_trees:
            return Feed.TREES
        return Feed.ROWS if self.drafter.drafts_nothing else Feed.CHAINS

    def lossless(self, sampling: Sampling) -> bool:
        return self.verify_tail and self.acceptance.lossless(sampling)

    def prepare(self, request: Request) -> None:
        """Call the drafter's `prepare`, if it has one."""
        if isinstance(self.drafter, Prepares):
            self.drafter.prepare(request)

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        self.prepare(request)
        return draft_then_verify(self.target, self.drafter, self.acceptance, request, trace, self.verify_tail)

    @torch.inference_mode()
    def stream(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        self.prepare(request)
        yield from rounds(self.target, self.drafter, self.acceptance, request, trace, self.verify_tail)


def draft_then_verify(
    target: Model, drafter: Drafter, accept: Acceptance, request: Request, trace: Trace, verify_tail: bool
) -> list[int]:
    """Continue the prompt until an end token or the length limit; returns prompt and continuation."""
    return whole(request, rounds(target, drafter, accept, request, trace, verify_tail))


def rounds(
    target: Model, drafter: Drafter, accept: Acceptance, request: Request, trace: Trace, verify_tail: bool
) -> Iterator[list[int]]:
    """The loop: yields the tokens that each round adds to the text."""
    limits = request.limits
    tokens = list(request.source.prompt)
    want, reads = drafter.wants, isinstance(accept, ReadsRound)
    if reads and accept.wants.head_input:
        want = replace(want, head_input=True)
    with trace.span("prefill"):
        session = target.start(request.source, limits.max_new_tokens, trace.forwards)
        text = drafter.start(request, session)
    while not limits.reached(tokens):
        committed = len(tokens)
        with trace.span("draft"):
            draft = limits.fitting(text.propose(tokens), tokens)
        if not verify_tail and limits.reached(tail := limits.append(tokens, draft.token_list)):
            trace.step(draft, None, limits.end_tokens)
            yield tail[committed:]
            return
        with trace.span("verify"):
            # the last committed token is not cached yet
            scores = session.extend(Rows(draft.under(tokens[-1]), draft.tree), want)
            rule = accept.in_round(tokens, scores) if reads else accept
            verdict = rule(draft, scores.logits[: len(draft) + 1], request)  # probes come last
        session.keep([0, *(node + 1 for node in verdict.path)])
        text.observe(draft, scores, verdict)
        drafted = draft.token_list
        tokens = limits.append(tokens, [*(drafted[node] for node in verdict.path), verdict.next_token])
        trace.step(draft, verdict, limits.end_tokens)
        yield tokens[committed:]


def whole(request: Request, new_tokens: Iterator[list[int]]) -> list[int]:
    """The prompt followed by all tokens that a loop yields for it."""
    tokens = list(request.source.prompt)
    for new in new_tokens:
        tokens += new
    return tokens
