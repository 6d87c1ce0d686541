"""Examples and their prompts: a later turn's prompt with the answers before it, and a prompt that
is too long with a shorter source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bild_lab.engine.models.checkpoint.chat import CompleteText
from bild_lab.errors import UserError


@dataclass(frozen=True)
class Continuation:
    """What comes before a later turn: the prompt of turn `id`, the text `between`, and the answer
    to that turn.
    """

    id: str
    between: str


@dataclass(frozen=True)
class Example:
    """One input text and its references.

    same_source: the id of the first example whose source it has too; None: no earlier one has it.
    prompt: the text for the tokenizer. While `continues` is set, the answer to the previous turn is
    not known, and `prompt` is only the text after that answer. `with_answers` gives the complete
    prompt.
    """

    id: str  # from the dataset, or "SPLIT-INDEX"; unique within a split
    source: str
    prompt: str
    references: tuple[str, ...] = ()
    category: str | None = None
    turn: int = 1
    continues: Continuation | None = None
    same_source: str | None = None


class SourcePrompt(str):
    """A prompt that knows its source: the text of which a long prompt loses the end.

    around: the texts before, between and behind its occurrences, which stay whole.
    """

    source: str
    around: tuple[str, ...]

    def __new__(cls, source: str, around: Sequence[str]) -> SourcePrompt:
        prompt = super().__new__(cls, source.join(around))
        prompt.source, prompt.around = source, tuple(around)
        return prompt

    def __getnewargs__(self) -> tuple[str, tuple[str, ...]]:  # for copies
        return self.source, self.around

    def within(self, max_tokens: int, count: Callable[[str], int]) -> SourcePrompt:
        """The prompt with at most so many tokens. count: how many a prompt has.

        Raises UserError if what is around the source leaves no room for it.
        """
        if count(self) <= max_tokens:
            return self
        fitting = longest_fitting(
            len(self.source), lambda length: count(self._shorter(length)) <= max_tokens
        )
        if not fitting:
            raise UserError(
                f"dataset.max_source_tokens={max_tokens} cuts the source alone, and what is around"
                " it has"
                f" {count(self._shorter(0))} tokens, so no room is left for {self.source!r:.40};"
                " raise it, or shorten the template, the solved examples (dataset.shots) or the"
                " input"
            )
        return self._shorter(fitting)

    def _shorter(self, characters: int) -> SourcePrompt:
        return type(self)(self.source[:characters], self.around)


class CompleteSourcePrompt(SourcePrompt, CompleteText):
    """A prompt that knows its source, in the template of the model's own tokenizer."""


def source_prompt(source: str, around: Sequence[str], complete: bool) -> SourcePrompt:
    """A prompt that knows its source. complete: in the template of the model's own tokenizer."""
    return (CompleteSourcePrompt if complete else SourcePrompt)(source, around)


def inserted(outer: Sequence[str], inner: Sequence[str]) -> tuple[str, ...]:
    """The texts around a source, where `inner` are those in a question, and `outer` those around
    the question.
    """
    around = [outer[0]]
    for text in outer[1:]:
        around[-1] += inner[0]
        around.extend(inner[1:])
        around[-1] += text
    return tuple(around)


def cut_sources(
    examples: Sequence[Example], max_tokens: int | None, count: Callable[[str], int]
) -> tuple[Example, ...]:
    """The examples with prompts of at most so many tokens, as `SourcePrompt.within` cuts them;
    None: any number.

    A prompt that is plain text is all source.
    """
    if max_tokens is None:
        return tuple(examples)
    return tuple(
        replace(example, prompt=_with_source(example.prompt).within(max_tokens, count))
        for example in examples
    )


def _with_source(prompt: str) -> SourcePrompt:
    if isinstance(prompt, SourcePrompt):
        return prompt
    return source_prompt(prompt, ("", ""), isinstance(prompt, CompleteText))


def longest_fitting(length: int, fits: Callable[[int], bool]) -> int:
    """The greatest number below `length` that fits, where smaller numbers fit too; 0 if none
    does.
    """
    fitting, too_long = 0, length
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if fits(middle):
            fitting = middle
        else:
            too_long = middle
    return fitting


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
    """One example with its complete prompt. previous_turns: the previous turns, with complete
    prompts.
    """
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
