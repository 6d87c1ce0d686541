"""Examples, and the prompts of conversations: each turn is an example whose prompt holds the turns before it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bild_lab.errors import UserError


@dataclass(frozen=True)
class Continuation:
    """What comes before a later turn: the prompt of turn `id`, the text `between`, and the answer to that turn."""

    id: str
    between: str


@dataclass(frozen=True)
class Example:
    """One input text and its references.

    prompt: the text for the tokenizer. While `continues` is set, the answer to the previous turn is not known, and
    `prompt` is only the text after that answer. `with_answers` gives the complete prompt.
    """

    id: str  # from the dataset, or "SPLIT-INDEX"; unique within a split
    source: str
    prompt: str
    references: tuple[str, ...] = ()
    category: str | None = None
    turn: int = 1
    continues: Continuation | None = None


@dataclass(frozen=True)
class Template:
    """The prompt format of a chat model (BiTA Table 6).

    first: contains {question}. next_turn: contains {answer}, to the previous turn, and then {question}. The tokenizer
    adds the start token. Raises UserError if a placeholder is missing, or if `first` begins with the start token.
    """

    first: str = "{question}"
    next_turn: str = "\n{answer}\n{question}"

    def __post_init__(self) -> None:
        if "{question}" not in self.first:
            raise UserError(f"dataset.chat_template must contain {{question}}, got {self.first!r}")
        if self.first.startswith("<s>"):
            raise UserError(
                f"dataset.chat_template must not begin with <s>, which the tokenizer adds, got {self.first!r}; "
                "leave it out"
            )
        if not re.search(r"\{answer\}.*\{question\}", self.next_turn, flags=re.DOTALL):
            raise UserError(
                f"dataset.next_turn_template must contain {{answer}} and then {{question}}, got {self.next_turn!r}"
            )


def fill_template(template: str, **values: str) -> str:
    """The template with its placeholders replaced. Other braces, and braces in the values, are unchanged."""
    return re.sub("{(" + "|".join(values) + ")}", lambda match: values[match[1]], template)


def conversation(first: Example, questions: Sequence[str], template: Template) -> list[Example]:
    """An example for each question: the first with a complete prompt, later ones without the previous turns."""
    between, _, behind = template.next_turn.partition("{answer}")
    turns = [replace(first, prompt=fill_template(template.first, question=questions[0]))]
    for number, question in enumerate(questions[1:], start=2):
        turns.append(
            replace(
                first,
                id=f"{first.id}/{number}",
                source=question,
                prompt=fill_template(behind, question=question),
                references=(),
                turn=number,
                continues=Continuation(turns[-1].id, between),
            )
        )
    return turns


def with_answers(examples: Sequence[Example], answers: Mapping[str, str]) -> tuple[Example, ...]:
    """The examples with complete prompts. answers: the answer to each earlier turn, by the turn's id.

    Raises UserError if an answer is missing. A turn must come before the turns that continue it.
    """
    whole: dict[str, Example] = {}
    for example in examples:
        whole[example.id] = with_earlier_turns(example, whole, answers)
    return tuple(whole.values())


def with_earlier_turns(example: Example, before: Mapping[str, Example], answers: Mapping[str, str]) -> Example:
    """One example with its complete prompt. before: the previous turns, with complete prompts."""
    if example.continues is None:
        return example
    earlier = example.continues.id
    if earlier not in answers:
        raise UserError(
            f"turn {example.turn} of example {example.id!r} needs the answer to {earlier!r}, which is not in "
            "dataset.history; add it, set dataset.turns=1 for first turns only, or set dataset.history=null"
        )
    prompt = before[earlier].prompt + example.continues.between + answers[earlier] + example.prompt
    return replace(example, prompt=prompt, continues=None)
