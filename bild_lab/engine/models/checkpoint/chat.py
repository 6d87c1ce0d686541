"""How the messages of a chat are written: the tokenizer's own template, and what it is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from bild_lab.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# the day that a template is told, unless another is chosen: the same prompts every day
DATE = "2026-01-01"
# a call of Transformers' function in a template
TODAY = re.compile(r"""strftime_now\s*\(\s*(["'])(.*?)\1\s*\)""")
# texts of a conversation in which an answer is looked at
QUESTION, ANSWER = "question", "{answer}"
RESERVED = ("messages", "conversation", "tokenize", "add_generation_prompt", "chat_template")


class CompleteText(str):
    """A text that holds all of its special tokens, as chat templates write them: a tokenizer adds
    none. What follows it is part of it.
    """

    def __add__(self, later_text: str) -> CompleteText:
        return CompleteText(str(self) + str(later_text))


def lacks_special_tokens(text: str) -> bool:
    """Whether the tokenizer is to add its special tokens."""
    return not isinstance(text, CompleteText)


@dataclass(frozen=True)
class ChatSettings:
    """What a chat template is told besides the messages.

    date: for templates that write the day, as YYYY-MM-DD; None: `DATE`. values: keywords of
    `apply_chat_template`, such as enable_thinking. Raises UserError for another date, and for
    keywords that are set here.
    """

    date: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            _ = self.day
        except (TypeError, ValueError) as error:
            raise UserError(
                f"chat_template_date must be a day such as {DATE}, got {self.date!r}"
            ) from error
        if not isinstance(self.values, Mapping):
            raise UserError(
                "chat_template_kwargs must be names with values, such as {enable_thinking:"
                f" false}}, got {self.values!r}"
            )
        if reserved := [name for name in RESERVED if name in self.values]:
            raise UserError(
                f"chat_template_kwargs cannot hold {reserved[0]}, which is set here; leave it out"
            )

    @property
    def day(self) -> date:
        return date.fromisoformat(DATE if self.date is None else self.date)


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    messages: Sequence[Mapping[str, str]],
    chat: ChatSettings,
) -> str:
    """The messages as the tokenizer's template writes them, up to where the answer begins.

    Templates of models that also read images may take a content as parts alone, and write nothing of
    a text. path: of the checkpoint, for messages. Raises UserError for several templates of which
    none is the default, for a value that the template does not name, and for messages that it
    refuses.
    """
    try:
        own_template = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            f"{path} has several chat templates, of which none is called default; give the one"
            " that is meant as text, dataset.chat_template, or name it default"
        ) from error
    template = dated(own_template, chat.day, path)
    if unknown := [
        name for name in chat.values if not re.search(rf"\b{re.escape(name)}\b", template)
    ]:
        raise UserError(
            f"the chat template of {path} does not name {unknown[0]}, so chat_template_kwargs would"
            " have no effect; leave it out, or correct the name"
        )
    options = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
    write = partial(tokenizer.apply_chat_template, **options, **chat.values)
    text, refusal = "", None
    try:
        text = write(list(messages))
    except (TemplateError, TypeError) as error:
        refusal = error
    if refusal is None and _holds_last(messages, text):
        return text
    text_of_parts = _written_in_parts(messages, write)
    if text_of_parts is not None:
        return text_of_parts
    if refusal is not None:
        raise UserError(
            f"the chat template of {path} refuses these messages: {refusal}; correct them"
        ) from refusal
    return text


def _written_in_parts(
    messages: Sequence[Mapping[str, str]], write: Callable[[list[Any]], str]
) -> str | None:
    """The messages as a template writes them whose contents are parts; None where it takes none
    either.
    """
    in_parts = [_in_parts(message) for message in messages]
    # some take the system's content as text alone
    system_as_text = [
        message if message.get("role") == "system" else parts
        for message, parts in zip(messages, in_parts, strict=True)
    ]
    for form in (in_parts, system_as_text):
        with suppress(TemplateError, TypeError):
            text = write(form)
            if _holds_last(messages, text) and not _shows_parts(form, text):
                return text
    return None


def _holds_last(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether the last message's content is in the text."""
    content = messages[-1].get("content")
    return not isinstance(content, str) or content.strip() in text


def _shows_parts(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether a template that takes a content as text has written parts as Python shows them."""
    contents = [message.get("content") for message in messages]
    return any(isinstance(content, list) and str(content) in text for content in contents)


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its text as the only part of its content."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def answer_in_history(
    tokenizer: PreTrainedTokenizerBase, path: str, answer: str, chat: ChatSettings
) -> str:
    """An answer as the tokenizer's template writes it before a later question, such as without its
    thinking, or without spaces around it.

    It stays as it is where the template refuses it, as some do an empty one, or writes what is
    around it otherwise.
    """

    def written(text: str) -> str:
        question = {"role": "user", "content": QUESTION}
        messages = [question, {"role": "assistant", "content": text}, question]
        return chat_text(tokenizer, path, messages, chat)

    text_before, _, text_after = written(ANSWER).partition(ANSWER)
    try:
        conversation = written(answer)
    except UserError:
        return answer
    # around an empty answer some templates write fewer spaces
    frames = ((text_before, text_after), (text_before.rstrip(), text_after.lstrip()))
    for start, end in frames:
        stop = len(conversation) - len(end)
        is_framed = conversation.startswith(start) and conversation.endswith(end)
        if is_framed and len(start) <= stop:
            return conversation[len(start) : stop]
    return answer


def dated(template: str, day: date, name: str) -> str:
    """The template with this day written where it would write today's.

    Raises UserError for a template whose dates have no fixed format.
    """
    written = TODAY.sub(lambda call: repr(day.strftime(call[2])), template)
    if re.search(r"strftime_now\s*\(", written):
        raise UserError(
            f"the chat template of {name} writes the date in a format that it computes, so every"
            " day would be another setting; give the template as text: dataset.chat_template"
        )
    return written
