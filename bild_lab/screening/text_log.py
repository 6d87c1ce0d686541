"""What the points of a screening wrote, a line for each example, on disk as soon as it is known.

The first line says what the texts depend on. A process that is killed loses only the examples that
it was decoding; the next one with the same points goes on after them.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bild_lab.files import append_line
from bild_lab.lab.store.hashing import content_hash
from bild_lab.screening.replay import ReplayedText

log = logging.getLogger(__name__)
FOLDER = "texts"  # its name in the folder of a sweep
TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class LoggedExample:
    """What all points wrote of one example.

    source: the name of its prompt. texts: in the order of the points. forwards: that the record of
    the prompt took, by "target" and "draft"; empty if an earlier example has the same prompt.
    """

    example: int
    source: str
    texts: list[ReplayedText]
    forwards: Mapping[str, int]

    def to_line(self) -> str:
        """Its line. Points that wrote the same text share it."""
        distinct = list(dict.fromkeys(text.token_ids for text in self.texts))
        place_of = {tokens: place for place, tokens in enumerate(distinct)}
        content = {
            "example": self.example,
            "source": self.source,
            "forwards": self.forwards,
            "texts": distinct,
            "points": [
                [place_of[text.token_ids], text.counts, text.features] for text in self.texts
            ],
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: bytes) -> LoggedExample | None:
        """The inverse of `to_line`; None for a line that is cut short or damaged."""
        try:
            content = json.loads(line) if line.endswith(b"\n") else {}
            token_ids = [tuple(tokens) for tokens in content["texts"]]
            texts = [
                ReplayedText(token_ids[place], Counter(counts), features)
                for place, counts, features in content["points"]
            ]
            return cls(content["example"], content["source"], texts, content["forwards"])
        except (ValueError, TypeError, KeyError, IndexError):
            return None


class TextLog:
    """The file of one list of points over one setting, which is made at the first example.

    folder: of the sweep. key: what the texts depend on; another key has another file.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self._key = dict(key)
        self.file = folder / FOLDER / f"{content_hash(self._key)}.jsonl"

    def read(self, sources: Sequence[str]) -> dict[int, LoggedExample]:
        """The examples that are logged, by their places. sources: the prompts of all examples.

        Lines that are cut short, or of other prompts, are left out: their examples are decoded anew.
        """
        if not self.file.is_file():
            return {}
        head, *lines = self.file.read_bytes().splitlines(keepends=True) or [b""]
        if head != f"{self._head()}\n".encode():  # cut short as it was begun
            self.file.unlink()
            return {}
        logged_examples = [LoggedExample.from_line(line) for line in lines]
        return {
            logged.example: logged
            for logged in logged_examples
            if logged is not None
            and logged.example < len(sources)
            and sources[logged.example] == logged.source
        }

    def append(self, logged: LoggedExample) -> None:
        """Add an example, and have it survive a kill."""
        if not self.file.is_file():
            append_line(self.file, self._head())
        append_line(self.file, logged.to_line())

    def _head(self) -> str:
        return json.dumps(self._key, sort_keys=True, default=str)


def texts_of_points(file: Path, count: int) -> Iterator[tuple[int, list[TokenIds]]]:
    """The places of the logged examples before `count`, each with the text of every point."""
    with file.open("rb") as stream:
        stream.readline()
        for line in stream:
            logged = LoggedExample.from_line(line)
            if logged is not None and logged.example < count:
                yield logged.example, [text.token_ids for text in logged.texts]
