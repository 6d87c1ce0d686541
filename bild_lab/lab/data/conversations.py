"""Conversations: the messages of a row as questions and answers, and an example for each turn, or
for the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from bild_lab.errors import UserError, require_choice
from bild_lab.lab.data.dataset_spec import REFERENCES, DatasetSpec, Template, fill_template
from bild_lab.lab.data.formats import Row, first_value
from bild_lab.lab.data.prompts import (
    Continuation,
    Example,
    inserted,
    source_prompt,
    with_answers,
)

# the speakers in ShareGPT's files, {"from", "value"}, and in those of chat models, {"role",
# "content"}
USER = "user"
ASKING, ANSWERING = ("human", USER), ("gpt", "chatgpt", "assistant", "bing", "bard")
SYSTEM = ("system", "developer")
TOOL = "tool"
TOOLS = (TOOL, "function", "function_call", "observation", "ipython")  # neither ask nor answer
SPEAKERS = (*SYSTEM, *ASKING, *ANSWERING, *TOOLS)

Message = tuple[str, str]  # a speaker and a text


def messages_of(spec: DatasetSpec, where: str, row: Row) -> list[Message] | None:
    """The source as messages, each with its speaker; None if it is not a conversation of such.

    Raises UserError for a message that is not text alone, and for an unknown speaker.
    """
    value = first_value(row, spec.source_column)[1] if spec.source_column else None
    if not isinstance(value, list | tuple) or (not value and spec.history != REFERENCES):
        return None
    for speaker, text in (("from", "value"), ("role", "content")):
        if all(
            isinstance(message, Mapping) and {speaker, text} <= set(message) for message in value
        ):
            for message in value:
                require_choice(f"{where}: {speaker} of a message", message[speaker], SPEAKERS)
            return [(message[speaker], message_text(where, message[text])) for message in value]
    return None


def message_text(where: str, content: object) -> str:
    """The text of a message, which may be parts such as {"type": "text", "text"}; empty for
    null. Raises UserError for what is not text alone.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [
        content_part.get("text") if isinstance(content_part, Mapping) else content_part
        for content_part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{where}: the content of a message must be text, got {content!r:.200}; correct it"
        )
    return "".join(texts)


def _answered(spec: DatasetSpec) -> bool:
    """Whether a conversation's own answers are used: as references, or as history."""
    return spec.history == REFERENCES or spec.reference_column == spec.source_column


def ends_with_its_question(spec: DatasetSpec) -> bool:
    """Whether the last question of a conversation is the one that is asked: another column has the
    answer to it.
    """
    return spec.has_references and not _answered(spec) and spec.turns == 1


def questions_and_answers(
    spec: DatasetSpec, where: str, messages: Sequence[Message]
) -> tuple[list[str], list[str]]:
    """The questions of a conversation, and the answer to each where these are used, else no
    answers.

    Of a conversation that `ends_with_its_question` all questions, and the answers between them.
    Raises UserError if it does not end with one, and has several.

    A system message first stands before the first question, with an empty line between. Another
    message before that is skipped, as FastChat does (`train.py`, `preprocess`). The conversation
    ends at the first message that is empty, of another speaker or out of turn, which FastChat does
    not take. Where its answers are used, a question without one is left out. Questions alone, as
    NVIDIA's files of SPEED-Bench have them, are all asked.
    """
    system_texts = [text for _, text in takewhile(lambda message: message[0] in SYSTEM, messages)]
    turns = messages[len(system_texts) :]
    if turns and turns[0][0] not in ASKING:
        turns = turns[1:]
    answers: list[str] = []
    if ends_with_its_question(spec) and sum(speaker in ASKING for speaker, _ in turns) > 1:
        alternating = _alternating(turns)
        if len(alternating) < len(turns) or len(turns) % 2 == 0:
            columns = " or ".join(spec.source_column)
            raise UserError(
                f"{where}: {columns} holds several questions, so the last one is asked after the"
                " answers to the others; end it with that question, with an answer between any two"
            )
        questions, answers = alternating[::2], alternating[1::2]
    elif not _answered(spec) and {speaker for speaker, _ in turns} == {USER}:
        texts = takewhile(str.strip, (text for _, text in turns))
        questions = list(texts)[: spec.turns]
    else:
        alternating = _alternating(turns)
        questions = alternating[::2][: spec.turns]
        if _answered(spec):
            answers = alternating[1::2][: spec.turns]
            questions = questions[: len(answers)]
    if questions:
        instructions = [text.strip() for text in system_texts if text.strip()]
        questions[0] = "\n\n".join([*instructions, questions[0]])
    return questions, answers


def _alternating(turns: Sequence[Message]) -> list[str]:
    """The texts of questions and answers in turn, until a message is empty or out of turn."""
    texts = []
    for index, (speaker, text) in enumerate(turns):
        expected_speakers = ASKING if index % 2 == 0 else ANSWERING
        if speaker not in expected_speakers or not text.strip():
            break
        texts.append(text)
    return texts


def conversation(
    first_turn: Example, questions: Sequence[str], template: Template
) -> list[Example]:
    """An example for each question: the first with a complete prompt, later ones without the
    previous turns.
    """
    turns = [replace(first_turn, prompt=fill_template(template.first_turn, question=questions[0]))]
    if len(questions) == 1:
        return turns
    between, question_template = template.around_answer
    for number, question in enumerate(questions[1:], start=2):
        turns.append(
            replace(
                first_turn,
                id=f"{first_turn.id}/{number}",
                source=question,
                prompt=fill_template(question_template, question=question),
                references=(),
                turn=number,
                continues=Continuation(turns[-1].id, between),
            )
        )
    return turns


def last_turn(
    example: Example,
    questions: Sequence[str],
    answers: Sequence[str],
    template: Template,
    around: Sequence[str],
) -> Example:
    """The example of a conversation's last question, behind the answers to those before it.

    around: the texts around that question, as of `SourcePrompt`.
    """
    turns = conversation(example, questions, template)
    ids = (turn.id for turn in turns)
    answered_turn = with_answers(turns, dict(zip(ids, answers, strict=False)))[-1]
    history = answered_turn.prompt.removesuffix(turns[-1].prompt)
    _, question_template = template.around_answer
    text_before, *texts_after = question_template.split("{question}")
    texts_around = inserted((history + text_before, *texts_after), around)
    prompt = source_prompt(questions[-1], texts_around, template.complete)
    return replace(example, prompt=prompt)
