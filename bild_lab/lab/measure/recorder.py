"""Decoding again with a recorder around the acceptance rule, and a model's own scores, one row
after another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict, common_prefix
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LAST_LOGITS, Model, OutputSpec, Rows, Scores
from bild_lab.engine.trace import Trace

Logits = Float[Tensor, " vocab"]


@dataclass(frozen=True)
class RecordedRound:
    """What a round showed: the text before it, prompt included, its rule before the verdict, the
    draft, the rule's logits, its verdict.
    """

    text: tuple[int, ...]
    rule: Acceptance
    draft: Draft
    logits: Float[Tensor, "n+1 vocab"]
    verdict: Verdict

    @property
    def rows(self) -> int:
        """How many rows ran in the verifying forward."""
        return len(self.draft) + 1 + (0 if self.draft.probes is None else len(self.draft.probes))

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """The contexts in which the round emitted a token: each one's length, prompt included, and
        row of logits.

        Tokens after the text's end are not emitted; the caller knows where that is.
        """
        rows = [0, *(node + 1 for node in self.verdict.path)]
        return [(len(self.text) + depth, row) for depth, row in enumerate(rows)]


class Recorder:
    """An acceptance rule that keeps its last round, None once that was taken."""

    def __init__(self, rule: Acceptance) -> None:
        self._rule, self.round = rule, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)  # what the rule requires and accepts

    def start(self, request: Request) -> Recorder:
        """This one, which records one text, with the rule of the text."""
        self._rule = self._rule.start(request)
        return self

    def in_round(self, tokens: Sequence[int], scores: Scores) -> Acceptance:
        """The rule of this round, recorded."""
        rule = self._rule.in_round(tokens, scores)

        def recorded(draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
            asked_rule = copy.copy(rule)  # its state changes as it decides
            verdict = rule(draft, logits, request)
            # a compiled step reuses its memory
            self.round = RecordedRound(tuple(tokens), asked_rule, draft, logits.clone(), verdict)
            return verdict

        return recorded


def recorded_rounds(
    method: DraftThenVerify, request: Request
) -> Iterator[tuple[RecordedRound | None, list[int]]]:
    """Decode again: each round, None for tokens that no round verified, and the tokens that it
    emitted.

    request: with a generator of its own, as the text was decoded.
    """
    recorder = Recorder(method.acceptance)
    for new_tokens in replace(method, acceptance=recorder).stream(request, Trace()):
        yield recorder.round, new_tokens
        recorder.round = None


class RowByRow:
    """A model's logits after texts of one request, one row after another.

    The rows that a text shares with the one before stay in the cache. Of the logits the last row
    stays: a vocabulary is large, and texts are long.
    """

    def __init__(self, model: Model, request: Request) -> None:
        self._session = model.start(request.source, request.limits.max_new_tokens)
        self._fed = list(request.source.prompt[:-1])
        self._logits: Logits | None = None  # after what is fed

    def after(self, text: Sequence[int]) -> Logits:
        """text: with the prompt."""
        if self._logits is None or self._fed != list(text):
            shared_length = common_prefix(self._fed, text[:-1])
            self._session.rollback(shared_length)
            for token in text[shared_length:]:
                logits = precise(self._session.extend([token], LAST_LOGITS).logits[0])
            self._fed, self._logits = list(text), logits.clone()
        return self._logits

    def together(
        self, length: int, rows: Rows, output_spec: OutputSpec
    ) -> Float[Tensor, "m vocab"]:
        """The logits of several rows at once, after the first `length` tokens of the last text."""
        self._session.rollback(length)
        self._fed, self._logits = self._fed[:length], None
        return precise(self._session.extend(rows, output_spec).logits)


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first place at which two texts differ, or one of them has ended; None if they are
    equal.
    """
    return None if list(tokens) == list(reference) else common_prefix(tokens, reference)


def largest_logit(logits: Sequence[Logits]) -> float:
    """The largest of these logits that is finite, by its size: a processor forbids a token by
    −inf.
    """
    return max(float(row[row.isfinite()].abs().max()) for row in logits)


def relative_difference(logits: Logits, reference: Logits) -> float:
    """The largest difference between two rows of logits, relative to their largest logit; inf if
    they forbid different tokens.
    """
    finite = logits.isfinite()
    if not torch.equal(finite, reference.isfinite()):
        return float("inf")
    return float((logits - reference)[finite].abs().max()) / largest_logit([logits, reference])
