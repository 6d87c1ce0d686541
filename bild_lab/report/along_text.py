"""Tokens per call of the target along the texts: drafts may get better or worse as a text grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.questions import questions_of, source_ids
from bild_lab.lab.schema.statistics import are_enough, ratio_of_totals

FIRST_STRETCH = 16  # tokens; each further stretch ends where a text is twice as long


@dataclass(frozen=True)
class Stretch:
    """A part of all texts, between two places.

    begin, end: how many tokens a text had before the stretch, and has after it. tokens_per_call: of
    the calls of the target whose first token lies there, with its 95 % interval over the texts.
    calls, texts: how many calls there were, in how many texts; a conversation counts as one.
    """

    begin: int
    end: int
    tokens_per_call: float
    low: float
    high: float
    calls: int
    texts: int

    @property
    def words(self) -> str:
        """Its tokens, from 1: `17 to 32`."""
        return f"{self.begin + 1} to {self.end}"


def stretches_of(examples: Sequence[MeasuredExample]) -> list[Stretch]:
    """The stretches that enough texts reach for an interval; none where no round was stored.

    The texts of a later stretch are the longer ones, so a difference between two stretches may be
    one between texts.
    """
    questions = questions_of(source_ids(examples))
    sums: dict[int, dict[str, list[int]]] = {}  # of tokens and calls, by stretch and question
    for question, example in zip(questions, examples, strict=True):
        for begin, added in _verified_rounds(example):
            text_sums = sums.setdefault(_stretch_at(begin), {}).setdefault(question, [0, 0])
            text_sums[0] += added
            text_sums[1] += 1
    return [
        _stretch(number, np.array(list(by_question.values()), dtype=float))
        for number, by_question in sorted(sums.items())
        if are_enough(len(by_question))
    ]


def _verified_rounds(example: MeasuredExample) -> list[tuple[int, int]]:
    """How many tokens the text had before each verified draft, and how many the draft added."""
    length, rounds = 0, []
    for measured_round in example.rounds:
        emitted = measured_round.accepted + (measured_round.next_token is not None)
        added = min(emitted, len(example.token_ids) - length)
        if measured_round.next_token is not None and added > 0:
            rounds.append((length, added))
        length += added
    return rounds


def _stretch_at(begin: int) -> int:
    """The number of the stretch with the token after so many."""
    return (begin // FIRST_STRETCH).bit_length()


def _stretch(number: int, sums: Float[np.ndarray, "texts 2"]) -> Stretch:
    """A stretch from the tokens and calls of each text."""
    tokens, calls = sums.T
    tokens_per_call, low, high = ratio_of_totals([tokens], [calls])
    return Stretch(
        begin=FIRST_STRETCH * 2 ** (number - 1) if number else 0,
        end=FIRST_STRETCH * 2**number,
        tokens_per_call=tokens_per_call,
        low=low,
        high=high,
        calls=int(calls.sum()),
        texts=len(tokens),
    )
