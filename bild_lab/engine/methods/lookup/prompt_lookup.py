"""Drafts by copying what followed the same words earlier in the text (speculative decoding §3.6;
Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bild_lab.engine.draft import Draft, empty_draft
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import Model, Session, on_device
from bild_lab.errors import require_whole

BOUNDARY = -1  # separates the encoder's input from the text: no match or copy crosses it


class PromptLookup(Drafter):
    """Proposes the tokens that followed the latest earlier occurrence of the text's longest suffix.

    Suffixes of `longest_match` tokens down to one are looked for in the encoder's input, if there
    is one in the text's own vocabulary, and in the text so far. A copy that reaches the end of the
    text continues with the tokens it has just copied, so that a repetition is drafted a full window
    ahead.
    """

    def __init__(self, target: Model, window: int, longest_match: int) -> None:
        require_whole("the draft window", window, 1)
        require_whole("longest_match", longest_match, 1)
        self._device = target.device
        self._nothing = empty_draft(target.device)
        self._window = window
        self._lengths = range(longest_match, 0, -1)

    def begin(self, request: Request, target: Session) -> None:
        self._limits = request.limits
        self._text: list[int] = []  # the encoder's input, then the tokens
        # the indices that follow each n-gram in the text
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._offset = 0  # where the tokens begin
        source = request.source
        if source.copyable:
            self._append(source.copyable)
            self._text.append(BOUNDARY)
            self._offset = len(self._text)
        self._append(source.prompt)

    def propose(self, tokens: list[int]) -> Draft:
        self._take_back(self._offset + len(tokens) - 1)  # the last token may replace a rejected one
        self._append(tokens[len(self._text) - self._offset :])
        drafted = self._copied(min(self._window, self._limits.room(tokens)))
        return Draft(on_device(drafted, self._device)) if drafted else self._nothing

    def rollback(self, length: int) -> None:
        self._take_back(self._offset + length)

    def _append(self, tokens: Sequence[int]) -> None:
        """Index every n-gram once its next token is known, so that a suffix never finds itself."""
        for token in tokens:
            for suffix in self._suffixes():
                self._places.setdefault(suffix, []).append(len(self._text))
            self._text.append(token)

    def _take_back(self, length: int) -> None:
        """Cut the indexed text to this length."""
        while len(self._text) > length:
            self._text.pop()
            for suffix in self._suffixes():
                self._places[suffix].pop()

    def _suffixes(self) -> Iterator[tuple[int, ...]]:
        """The last tokens of the text, the longest suffix first."""
        return (
            tuple(self._text[-length:]) for length in self._lengths if length <= len(self._text)
        )

    def _copied(self, count: int) -> list[int]:
        """The tokens after the latest match of the longest suffix, up to an end token or the
        encoder input's end.
        """
        start = self._latest_match()
        if start is None:
            return []
        drafted: list[int] = []
        while len(drafted) < count:
            index = start + len(drafted)
            beyond_text = index - len(self._text)
            token = self._text[index] if beyond_text < 0 else drafted[beyond_text]
            if token == BOUNDARY:
                break
            drafted.append(token)
            if token in self._limits.end_tokens:
                break
        return drafted

    def _latest_match(self) -> int | None:
        """Where the latest match of the longest suffix ends in the text; None without a match."""
        for suffix in self._suffixes():
            if places := self._places.get(suffix):
                return places[-1]
        return None
