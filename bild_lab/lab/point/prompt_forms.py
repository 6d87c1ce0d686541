"""The forms in which prompts are given: text, token ids, the messages of a chat, or a list of such
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bild_lab.engine.models.checkpoint.checkpoint import Prompt
from bild_lab.errors import UserError, require_choice
from bild_lab.lab.data.conversations import SYSTEM, TOOLS, USER, message_text

PROMPT_FORMS = "text, token ids or the messages of a chat, or a list of such prompts"
ASSISTANT = "assistant"
ROLES = (*SYSTEM, USER, ASSISTANT, *TOOLS)  # of the messages that chat templates know
RAW = (bytes, bytearray, memoryview)  # sequences of numbers that are no token ids


def plain_prompt(prompt: Any) -> Any:
    """The prompt with tensors and arrays as lists of token ids.

    Raises UserError for those that are not one row. What they hold `is_prompt_list` looks at.
    """
    if isinstance(prompt, list | tuple):
        return [
            plain_prompt(element) if hasattr(element, "ndim") and element.ndim else element
            for element in prompt
        ]
    if not hasattr(prompt, "ndim") or isinstance(prompt, (str, *RAW)):  # NumPy has texts of its own
        return prompt
    # a list of one prompt needs no padding
    if prompt.ndim == 1 or (prompt.ndim == 2 and len(prompt) == 1):
        return prompt.tolist()
    raise UserError(
        f"the token ids of a prompt are one row, got an array of shape {tuple(prompt.shape)}; give"
        " a list of prompts, each without padding"
    )


def plain_value(value: Any) -> Any:
    """A number of NumPy or PyTorch as Python's own, a type and a device of PyTorch by their names; any
    other value as it is.
    """
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else value


def is_prompt_list(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is a list of prompts: its first element is text, token ids or a list of messages.

    Raises UserError for what is neither a prompt nor such a list.
    """
    if isinstance(prompt, str):
        return False
    if (
        not isinstance(prompt, Sequence)
        or isinstance(prompt, RAW)
        or not all(map(_may_be_in_a_prompt, prompt))
    ):
        encoded = isinstance(prompt, Mapping) and "input_ids" in prompt
        hint = "; of a tokenizer's output give the input_ids" if encoded else ""
        raise UserError(f"a prompt is {PROMPT_FORMS}, got {prompt!r:.80}{hint}")
    if not prompt or not isinstance(prompt[0], Sequence):
        return False
    if no_prompts := [element for element in prompt if not isinstance(element, Sequence | Mapping)]:
        raise UserError(f"a prompt is {PROMPT_FORMS}, got {no_prompts[0]!r:.80} among prompts")
    return True


def is_chat(prompt: Prompt) -> bool:
    """Whether the prompt is the messages of a chat. Raises UserError for a message alone."""
    if isinstance(prompt, Mapping):
        raise UserError(f"a message stands in the list of its chat, got {prompt!r:.80} alone")
    return not isinstance(prompt, str) and any(isinstance(element, Mapping) for element in prompt)


def chat_messages(prompt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat, with parts of a content as one text.

    Raises UserError for messages without text, of an unknown role, or with the answer.
    """
    messages = [
        _checked_message(f"message {number} of the chat", message)
        for number, message in enumerate(prompt, start=1)
    ]
    if messages[-1]["role"] == ASSISTANT:
        raise UserError(
            f"the last message of the chat is what the model answers, got one of the {ASSISTANT};"
            f" end the chat with a message of the {USER}"
        )
    return messages


def _checked_message(name: str, message: object) -> dict[str, Any]:
    """The message with its content as text. name: of the message."""
    values = message if isinstance(message, Mapping) else {}
    role, content = values.get("role"), values.get("content")
    # of a call of tools alone a template writes the call
    only_calls = content is None and values.get("tool_calls")
    if not isinstance(role, str) or (content is None and not only_calls):
        raise UserError(
            f"{name} must have text as role and content, got {message!r:.80}; write"
            ' {"role": "user", "content": "…"}'
        )
    require_choice(f"the role of {name}", role, ROLES)
    return {**values} if only_calls else {**values, "content": message_text(name, content)}


def _may_be_in_a_prompt(element: object) -> bool:
    """Whether it is a token id, a message, or a prompt, so that a list of such can be decoded."""
    if isinstance(element, (bool, *RAW)):
        return False
    return isinstance(element, Mapping | Sequence) or hasattr(element, "__index__")
