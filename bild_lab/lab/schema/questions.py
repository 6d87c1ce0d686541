"""Which examples are of one question, by their ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TEMPLATE_NUMBER = re.compile(r"@\d+$")


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
