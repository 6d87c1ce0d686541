"""How the messages of a chat are written: the tokenizer's own template, and what it is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from bild_lab.errors import UserError, warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # "role" and "content"
# the day that a template is told, unless another is chosen: the same prompts every day
DATE = "2026-01-01"
# a call of Transformers' function in a template
TODAY = re.compile(r"""strftime_now\s*\(\s*(["'])(.*?)\1\s*\)""")
# texts of a conversation in which an answer is looked at
QUESTION, ANSWER = "question", "{answer}"
END_OF_THOUGHT = "</think>"  # how models end what they think before an answer
# what a text holds of gpt-oss's channels before the answer's, whose marks are special tokens
THOUGHT_CHANNELS = re.compile(r"\Aanalysis.*assistantfinal", re.DOTALL)
# how a text begins whose thoughts have no end: <think>, or gpt-oss's channel
CUT_THOUGHTS = re.compile(r"\s*<think>|analysis[A-Z]")
DENIALS = ("false", "no", "off", "0", "none", "null")  # texts that a template may take for true
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
    messages: Sequence[Message],
    chat: ChatSettings,
    answered: bool = False,
    warns: bool = True,
) -> str:
    """The messages as the tokenizer's template writes them, up to where the answer begins; answered:
    the last one is the answer, and the text goes on to its end.

    Templates of models that also read images may take a content as parts alone, and write nothing of
    a text. path: of the checkpoint, for messages. warns: of messages that are left out; False for
    samples that nobody wrote. Raises UserError for several templates of which none is the default,
    for a value that the template does not name, or takes for its contrary, and for messages that it
    refuses.
    """
    template = _template(tokenizer, path, chat)

    def write(form: Sequence[Message], values: Mapping[str, Any] = chat.values) -> str:
        options = {"tokenize": False, "add_generation_prompt": not answered}
        return tokenizer.apply_chat_template(
            list(form), chat_template=template, **options, **values
        )

    _require_understood(path, messages, chat, write)
    form, text = _written(path, messages, write)
    if warns:
        _warn_of_left_out(path, form, text, write)
    return text


def _template(tokenizer: PreTrainedTokenizerBase, path: str, chat: ChatSettings) -> str:
    """The tokenizer's template with its day written. Raises UserError as `chat_text` does."""
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
    return template


def _require_understood(
    path: str, messages: Sequence[Message], chat: ChatSettings, write: Callable[..., str]
) -> None:
    """Raise UserError for a text such as "false" that the template takes for true, as any text is."""
    for name, value in chat.values.items():
        if not isinstance(value, str) or value.strip().lower() not in DENIALS:
            continue
        with suppress(TemplateError, TypeError):  # another kind of value is not for this template
            as_text, as_true, as_false = (
                write(messages, {**chat.values, name: form}) for form in (value, True, False)
            )
            if as_text == as_true != as_false:
                raise UserError(
                    f"the chat template of {path} takes the text {name}={value!r} for true; give"
                    f" chat_template_kwargs {name}: false, without quotes"
                )


def _written(
    path: str, messages: Sequence[Message], write: Callable[..., str]
) -> tuple[Sequence[Message], str]:
    """The form of the messages that the template takes, and the text that it makes of it."""
    text, refusal = "", None
    try:
        text = write(messages)
    except (TemplateError, TypeError) as error:
        refusal = error
    if refusal is None and _holds_last(messages, text):
        return messages, text
    in_parts = [_in_parts(message) for message in messages]
    # some take the system's content as text alone
    system_as_text = [
        message if message.get("role") == "system" else parts
        for message, parts in zip(messages, in_parts, strict=True)
    ]
    for form in (in_parts, system_as_text):
        with suppress(TemplateError, TypeError):  # it takes no parts either
            text_of_parts = write(form)
            if _holds_last(messages, text_of_parts) and not _shows_parts(form, text_of_parts):
                return form, text_of_parts
    if refusal is not None:
        raise UserError(
            f"the chat template of {path} refuses these messages: {refusal}; correct them"
        ) from refusal
    return messages, text


def _warn_of_left_out(
    path: str, form: Sequence[Message], text: str, write: Callable[..., str]
) -> None:
    """Warn of messages of which the template writes nothing, such as a system's behind the first:
    the text is the same whatever they say.
    """
    for place, message in enumerate(form):
        said = _said(message)
        if not said.strip() or said.strip() in text:
            continue
        other = {**message, "content": f"{said} {QUESTION}"}
        if isinstance(message["content"], list):
            other = _in_parts(other)
        with suppress(TemplateError, TypeError):  # it is read, at least
            if write([*form[:place], other, *form[place + 1 :]]) == text:
                warn_once(
                    f"{path}: its chat template leaves out a message from the"
                    f" {message.get('role')}, which the model does not read; write it into a"
                    " question, or leave it out"
                )


def _holds_last(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether the last message's content is in the text."""
    content = messages[-1].get("content")
    return not isinstance(content, str) or content.strip() in text


def _said(message: Message) -> str:
    """The text of a message, or of the only part of its content; empty for any other content."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text")
    return content if isinstance(content, str) else ""


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


def without_thoughts(text: str) -> str:
    """A text without what a model thought before its answer; empty if the length limit cut the
    thoughts. Those that the prompt began, and that were cut, cannot be told from an answer.
    """
    answer = THOUGHT_CHANNELS.sub("", text).rpartition(END_OF_THOUGHT)[2]
    return "" if CUT_THOUGHTS.match(answer) else answer


def end_of_answer(tokenizer: PreTrainedTokenizerBase, path: str, chat: ChatSettings) -> str:
    """What the tokenizer's template writes behind the last answer of a chat; empty for one that
    refuses an answer at the end, or writes it otherwise.
    """
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        text = chat_text(tokenizer, path, messages, chat, answered=True, warns=False)
    except UserError:
        return ""
    return text.partition(ANSWER)[2]


def answer_in_history(
    tokenizer: PreTrainedTokenizerBase, path: str, answer: str, chat: ChatSettings
) -> str:
    """An answer as the tokenizer's template writes it before a later question, such as without its
    thinking, or without spaces around it. gpt-oss's does not know what is left of its channels.

    It stays as it is where the template refuses it, as some do an empty one, or writes what is
    around it otherwise.
    """

    def written(text: str) -> str:
        question = {"role": "user", "content": QUESTION}
        messages = [question, {"role": "assistant", "content": text}, question]
        return chat_text(tokenizer, path, messages, chat, warns=False)

    answer = THOUGHT_CHANNELS.sub("", answer)
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
