"""Stop strings: texts that end decoding, found in what the new tokens write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

from bild_lab.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a tokenizer writes for a part of a character
# by how many tokens the part that is decoded grows, so that neighbouring tokens decode the same parts
TOKEN_STEP = 8
# how many characters a tokenizer may write otherwise at the beginning of a part
UNSURE_CHARACTERS = 8
CACHED_PARTS = 64  # decoded parts that are remembered


class Writer(Protocol):
    """What writes tokens as text: a `Checkpoint`, whose module imports this one through requests."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def silent_special_tokens(self) -> dict[str, int]:
        """The special tokens that no text shows, with their ids."""

    def continuation(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add after a prompt."""


@dataclass(frozen=True)
class StopStrings:
    """A text ends with the first token after which what was written holds one of these strings.

    A string that names a special token, which no text shows, ends a text with that token. Only a
    text's last tokens are decoded: so many that no stop string, and no part of a character, can
    begin before them. The result is that of decoding all new tokens after each of them. Raises
    UserError for a string with a special token in it.
    """

    strings: tuple[str, ...]
    checkpoint: Writer

    def __post_init__(self) -> None:
        special = self.checkpoint.silent_special_tokens
        for stop in set(self.strings) - special.keys():
            if inside := [piece for piece in special if piece in stop]:
                raise UserError(
                    f"decoding.stop must be text that a model writes, got {stop!r}, and no text"
                    f" shows the special token {inside[0]}; give {inside[0]} alone, with which a"
                    " text then ends"
                )

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        special = self.checkpoint.silent_special_tokens
        return frozenset(special[stop] for stop in self.strings if stop in special)

    @cached_property
    def _decode(self) -> Callable[[tuple[int, ...]], str]:
        tokenizer = self.checkpoint.tokenizer
        return lru_cache(CACHED_PARTS)(
            lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True)
        )

    def completed(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these new tokens completes a stop string. None before it did."""
        if tokens[-1] in self._special_tokens:
            return True
        start = self._start(tokens)
        if start == 0:
            text = self.checkpoint.continuation(tokens)
            return any(stop in text for stop in self.strings)
        text = self._decode(tuple(tokens[start:]))
        return any(text.find(stop, UNSURE_CHARACTERS) >= 0 for stop in self.strings)

    def _start(self, tokens: Sequence[int]) -> int:
        """From which token on to decode: the text before the last token must be longer than any
        stop string.
        """
        length = max(map(len, self.strings)) + 2 * UNSURE_CHARACTERS
        start = ((len(tokens) - 1) // TOKEN_STEP - 1) * TOKEN_STEP
        while start > 0:
            # later tokens complete a character at its end
            text = self._decode(tuple(tokens[start:-1])).rstrip(UNFINISHED)
            if len(text) >= length and UNFINISHED not in text:
                return start
            start -= TOKEN_STEP
        return 0


def before_stop(text: str, strings: Sequence[str]) -> str:
    """The text before the first of these strings."""
    places = [text.find(stop) for stop in strings]
    first_place = min((place for place in places if place >= 0), default=len(text))
    return text[:first_place]
