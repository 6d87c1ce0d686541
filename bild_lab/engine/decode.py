"""The draft-then-verify loop that all drafting methods share: `DraftThenVerify.rounds`.

Where the target drafts nothing, an accelerator may decode several tokens in one program: one call of
its session, in which the device chooses each token itself and the host does not wait for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from bild_lab.engine.batch_scheduler import current_batch
from bild_lab.engine.draft import Draft, Verdict, empty_draft
from bild_lab.engine.draft_checks import require_distributions, require_draft, require_verdict
from bild_lab.engine.protocols import Acceptance, Drafter, Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import (
    ChainSpec,
    DraftShape,
    Model,
    OutputSpec,
    Rows,
    Scores,
    Session,
    SessionOptions,
    merged_outputs,
)
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError, first_line, require_flag

PROGRAM_TOKENS = 32  # how many one program decodes
# with stop strings, which no program knows: what it decodes after one is lost
PROGRAM_TOKENS_BEFORE_STOP = 8


class TokenLoop(Method, Protocol):
    """A method over one target that finds the tokens of a text round by round."""

    target: Model

    @property
    def engine(self) -> str:
        return self.target.engine

    @abstractmethod
    def rounds(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        """Yields the tokens that each round adds to the text, until the text ends."""

    def prepare(self, request: Request) -> None:
        """Nothing to prepare."""

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        self.prepare(request)
        tokens = list(request.source.prompt)
        for new_tokens in self._checked_rounds(request, trace):
            tokens += new_tokens
        return tokens

    @torch.inference_mode()
    def stream(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        self.prepare(request)
        yield from self._checked_rounds(request, trace)

    def _checked_rounds(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        """The rounds. Raises UserError for one after which a text might never end: without a token,
        or beyond the length limit.
        """
        name, room = type(self).__name__, request.limits.max_new_tokens
        for new_tokens in self.rounds(request, trace):
            if not isinstance(new_tokens, list) or not new_tokens:
                raise UserError(
                    f"{name} must yield a list of one or more tokens each round, got {new_tokens!r}"
                )
            room -= len(new_tokens)
            if room < 0:
                raise UserError(
                    f"{name} has emitted more than the {request.limits.max_new_tokens} tokens that"
                    " a text may have; request.limits.append cuts a text, and"
                    " request.limits.reached says that it has ended"
                )
            yield new_tokens


@dataclass(frozen=True)
class DraftThenVerify(TokenLoop):
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
        rule_name, drafter_name = type(self.acceptance).__name__, type(self.drafter).__name__
        if self.drafter.drafts_trees and not self.acceptance.accepts_trees:
            raise UserError(
                f"{rule_name} accepts chains of tokens, but {drafter_name} drafts trees; "
                "use ExactMatch or SpeculativeSampling with it"
            )
        if lacking := sorted(self.acceptance.needs - self.drafter.gives):
            raise UserError(
                f"{rule_name} needs the {lacking[0]} of every draft, which {drafter_name} does not"
                " give here; draft with ModelDrafter and keeps_probs: true"
            )

    @property
    def draft_shape(self) -> DraftShape:
        if self.drafter.drafts_trees:
            return DraftShape.TREES
        return DraftShape.ROWS if self.drafter.drafts_nothing else DraftShape.CHAINS

    @property
    def greedy_only(self) -> bool:
        return self.drafter.greedy_only or self.acceptance.greedy_only

    @cached_property
    def required_outputs(self) -> OutputSpec:
        """What a forward of the target returns: what the drafter and the rule need."""
        return merged_outputs(self.drafter.required_outputs, self.acceptance.required_outputs)

    def lossless(self, sampling: Sampling) -> bool:
        return self.verify_tail and self.acceptance.lossless(sampling)

    def prepare(self, request: Request) -> None:
        self.drafter.prepare(request)

    @torch.inference_mode()
    def decode(self, request: Request, trace: Trace) -> list[int]:
        """The prompt's tokens, and those of all rounds. A target without a draft decodes several
        tokens at once on an accelerator, where it would wait for the host after each.

        Texts of a batch go on token by token, so that a new text begins as soon as one has ended.
        """
        self.prepare(request)
        tokens = list(request.source.prompt)
        by_programs = (
            self.target.device.type != "cpu"
            and self.decodes_by_programs(request)
            and not trace.reads_logits
            and current_batch() is None
        )
        for new_tokens in self.rounds(request, trace, by_programs):
            tokens += new_tokens
        return tokens

    def decodes_by_programs(self, request: Request) -> bool:
        """Whether the target may decode several tokens in one program: it drafts nothing, so that
        they are what its rounds would emit one by one.
        """
        return (
            self.drafter.drafts_nothing
            and request.sampling.greedy
            and self.acceptance.lossless(request.sampling)
        )

    def rounds(
        self, request: Request, trace: Trace, by_programs: bool = False
    ) -> Iterator[list[int]]:
        """The loop: yields the tokens that each round adds to the text.

        The text's last token is committed but not cached yet, so it runs with the draft.
        by_programs: of a request that `decodes_by_programs`; after the first token yields those of
        each program, or of each round where the target's session has none.
        """
        limits = request.limits
        tokens = list(request.source.prompt)
        with trace.span("prefill"):
            session, drafter = self._start(request, trace)
        rule = self.acceptance.start(request)

        while not limits.reached(tokens):
            committed = len(tokens)
            # 1. the drafter proposes what may follow
            with trace.span("draft"):
                draft = self._proposed(drafter, tokens, is_first=not trace.rounds)
                draft = draft.up_to_depth(limits.positions_left(tokens))
            if not self.verify_tail:
                drafted_text = limits.append(tokens, draft.token_list)
                if limits.reached(drafted_text):
                    stopped = limits.tokens_until_stop(drafted_text, committed)
                    trace.step(draft, None, limits.end_tokens, stopped)
                    yield drafted_text[committed:]
                    return

            # 2. the target scores it in one forward, and the rule says how much of it is accepted
            with trace.span("verify"):
                scores = self._scored(session, draft, tokens[-1], request)
                verdict = self._judged(rule, draft, scores, tokens, request)

            # 3. accepted rows stay in the target's cache, and the drafter follows
            session.keep(verdict.rows)
            drafter.observe(draft, scores, verdict)

            # 4. accepted tokens and the target's own after them go on with the text
            tokens = limits.append(tokens, verdict.tokens(draft))
            stopped = limits.tokens_until_stop(tokens, committed)
            trace.step(draft, verdict, limits.end_tokens, stopped)
            trace.emitted(tokens[committed:], scores.logits, verdict.rows)
            yield tokens[committed:]

            # the first token came alone, with the prompt; where the session has no program, or none
            # for the rest of the text, rounds go on
            if by_programs:
                tokens = yield from tokens_by_programs(session, tokens, limits, trace)
                by_programs = False

    def _start(self, request: Request, trace: Trace) -> tuple[Session, Drafter]:
        """The target's session of a text, and the drafter that drafts for it."""
        room = request.limits.max_new_tokens
        session = self.target.start(request.source, room, SessionOptions(trace.forwards))
        return session, self.drafter.start(request, session)

    def _proposed(self, drafter: Drafter, tokens: list[int], is_first: bool) -> Draft:
        """The draft after these tokens. Raises UserError for what is no draft, and for a drafter that
        changes the tokens.

        is_first: of its text, whose distributions are checked too; not those of all, as rounds are
        timed.
        """
        committed, drafter_name = len(tokens), type(self.drafter).__name__
        draft = drafter.propose(tokens)
        require_draft(draft, drafter_name, self.drafter.drafts_trees)
        if is_first:
            require_distributions(draft, drafter_name)
        if len(tokens) != committed:
            raise UserError(
                f"{drafter_name} has changed the list of tokens that it was asked to continue; let"
                " it change a copy, list(tokens)"
            )
        return draft

    def _scored(self, session: Session, draft: Draft, last_token: int, request: Request) -> Scores:
        """What the target gives for the last committed token and the draft below it. Raises UserError
        for a drafted token that the target does not have.
        """
        rows = Rows(draft.row_tokens(last_token), draft.tree)
        try:
            return session.extend(rows, self.required_outputs)
        except IndexError as error:  # an engine's word for such a token, and for other faults
            for token in sorted(set(draft.token_list)):
                if not self._reads(token, request.source):
                    raise UserError(
                        f"{type(self.drafter).__name__} has drafted token {token}, which the target"
                        f" cannot read ({first_line(error)}); draft token ids of its vocabulary"
                    ) from error
            raise

    def _judged(
        self,
        rule: Acceptance,
        draft: Draft,
        scores: Scores,
        tokens: list[int],
        request: Request,
    ) -> Verdict:
        """What the rule of this text decides about the draft after these tokens. Raises UserError for
        what is no verdict on it.
        """
        draft_logits = scores.logits[: len(draft) + 1]  # the rows of probes come last
        verdict = rule.in_round(tokens, scores)(draft, draft_logits, request)
        require_verdict(verdict, draft, draft_logits, type(self.acceptance).__name__)
        return verdict

    def _reads(self, token: int, source: Source) -> bool:
        """Whether the target can read this token after a source."""
        try:
            self.target.start(source, 1).extend([token])
        except IndexError:
            return False
        return True


def tokens_by_programs(
    session: Session, tokens: list[int], limits: Limits, trace: Trace
) -> Generator[list[int], None, list[int]]:
    """Yields the target's own greedy tokens, several of which its session decodes in one program.

    Returns the text when it has ended, or when the session has no program.
    """
    no_draft = empty_draft(torch.device("cpu"))
    most_tokens = PROGRAM_TOKENS if limits.stop is None else PROGRAM_TOKENS_BEFORE_STOP
    while not limits.reached(tokens):
        chain = ChainSpec(min(most_tokens, limits.room(tokens)), limits.end_tokens)
        with trace.span("verify"):
            session.rollback(len(tokens) - 1)
            decoded = session.draft(tokens[session.length :], chain)  # the target for itself
        if decoded is None:
            return tokens
        committed = len(tokens)
        tokens = limits.append(tokens, decoded.tokens)
        for token in tokens[committed:]:
            trace.step(no_draft, Verdict((), token), limits.end_tokens)
        yield tokens[committed:]
    return tokens
