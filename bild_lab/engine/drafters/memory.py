"""What a drafter remembers of earlier texts, so that a text that comes again finds what it found the first time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bild_lab.engine.request import Source

Key = tuple[tuple[int, ...], tuple[int, ...]]


def key_of(source: Source) -> Key:
    """The prompt's tokens and the encoder's tokens."""
    return source.prompt, () if source.encoder_ids is None else tuple(source.encoder_ids[0].tolist())


class Memory:
    """One thing for each source, in the order in which the sources first came."""

    def __init__(self) -> None:
        self._things: dict[Key, Any] = {}

    def __contains__(self, source: Source) -> bool:
        return key_of(source) in self._things

    def __getitem__(self, source: Source) -> Any:
        return self._things[key_of(source)]

    def put(self, source: Source, thing: Any) -> None:
        """Remember the newest thing of a source, in its first place."""
        self._things[key_of(source)] = thing

    def before(self, source: Source) -> Sequence[Any]:
        """The things of all sources that came before this one first came."""
        key, things = key_of(source), list(self._things.values())
        return things[: list(self._things).index(key)] if key in self._things else things
