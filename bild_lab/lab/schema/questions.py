"""Which examples are of one question, by their ids, and which have one source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

_TEMPLATE_NUMBER = re.compile(r"@\d+$")


class WithSource(Protocol):
    """An example. same_source: the id of the first one with its source, None if it is that itself."""

    @property
    def id(self) -> str: ...

    @property
    def same_source(self) -> str | None: ...


def source_ids(examples: Iterable[WithSource]) -> list[str]:
    """The id of the first example with the source of each: questions on one passage are no
    independent ones, and rows that repeat a text even less.
    """
    return [example.same_source or example.id for example in examples]


def questions_of(ids: Sequence[str]) -> list[str]:
    """The question of each example, by its id: a question in several templates ("train-0@2") and
    the later turns of a conversation ("train-0/2") share that of the first.

    Ids of a dataset's own may end alike ("HumanEval/2"), so a turn counts as later only if there is
    an earlier one.
    """
    known = set(ids)
    questions = []
    for example_id in ids:
        first_turn, _, turn = example_id.rpartition("/")
        is_later = turn.isdecimal() and first_turn in known
        questions.append(_TEMPLATE_NUMBER.sub("", first_turn if is_later else example_id))
    return questions
