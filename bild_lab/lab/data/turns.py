"""Complete prompts of conversations: a later turn follows the answers to the turns before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bild_lab.errors import UserError
from bild_lab.lab.data.example import Example


def with_answers(examples: Sequence[Example], answers: Mapping[str, str]) -> tuple[Example, ...]:
    """The examples with complete prompts. answers: the answer to each earlier turn, by the turn's
    id.

    Raises UserError if an answer is missing. A turn must come before the turns that continue it.
    """
    complete_turns: dict[str, Example] = {}
    for example in examples:
        complete_turns[example.id] = with_earlier_turns(example, complete_turns, answers)
    return tuple(complete_turns.values())


def with_earlier_turns(
    example: Example, previous_turns: Mapping[str, Example], answers: Mapping[str, str]
) -> Example:
    """One example with its complete prompt. previous_turns: the previous turns, with complete prompts."""
    if example.continues is None:
        return example
    earlier = example.continues.id
    if earlier not in answers:
        raise UserError(
            f"turn {example.turn} of example {example.id!r} needs the answer to {earlier!r}, which"
            " is not in dataset.history; add it, set dataset.turns=1 for first turns only, or set"
            " dataset.history=null"
        )
    prompt = (
        previous_turns[earlier].prompt
        + example.continues.between
        + answers[earlier]
        + example.prompt
    )
    return replace(example, prompt=prompt, continues=None)
