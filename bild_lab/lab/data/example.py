"""An example: one text to decode from, the prompt made of it, and its references."""

from __future__ import annotations

from dataclasses import dataclass


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
