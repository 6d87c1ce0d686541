"""Several texts at once: each text's loop runs as it is, and the forwards that they want next run
as one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import greenlet
import torch

from bild_lab.errors import UserError, require_whole

Result = TypeVar("Result")
# sources that are encoded at once: more would pay no better, and their keys and values are large
MOST_AHEAD = 16


@dataclass(frozen=True)
class PendingOp:
    """Work that a text waits for. Work with equal keys runs as one.

    size: of the model; smaller models run first, so that the target waits until every text wants
    it. run: takes the work of several texts and gives a result for each. ahead: it depends on the
    text's source alone, so it may run before the text has a place in the batch.
    """

    key: Hashable
    size: int
    run: Callable[[list[Any]], Sequence[Any]]
    work: Any
    ahead: bool = False


@dataclass(frozen=True)
class Ended(Generic[Result]):
    """A text that has ended.

    latency_s: seconds from its place in the batch to its end, waits for others included. share_s:
    its part of the batch's seconds: what ran for it alone, and an equal part of what ran for
    several.
    """

    result: Result
    latency_s: float
    share_s: float


class Loop(greenlet.greenlet):
    """The loop of one text of a batch."""

    batch: Batch


def current_batch() -> Batch | None:
    """The batch whose text's loop the caller is; None outside of batches.

    Such a loop must not hand work to another thread, which could not wait with it.
    """
    loop = greenlet.getcurrent()
    return loop.batch if isinstance(loop, Loop) else None


@dataclass(eq=False)
class _Text:
    index: int
    loop: Loop
    wanted: PendingOp | None = None
    joined: float | None = None  # when it got its place
    before_s: float = 0.0  # of work that ran for it before that
    share_s: float = 0.0


class Batch:
    """Runs the loops of several texts side by side.

    A loop is any function. It runs in a greenlet, and stops in `wait` until what it wants has run
    together with what the others want. A text takes its place as soon as another has ended
    (continuous batching). size: texts that decode at once. As many more may have begun, so that
    their encoders run together.

    synchronize: waits until the device has done its work, so that seconds go to those whose work it
    was. sizes: of every run, its key and how many texts took part.
    """

    def __init__(self, size: int, synchronize: Callable[[], None] = lambda: None) -> None:
        require_whole("the batch size", size, 1)
        self.size, self.synchronize = size, synchronize
        self.sizes: list[tuple[Hashable, int]] = []
        self._hub: greenlet.greenlet | None = None

    def wait(self, wanted: PendingOp) -> Any:
        """What the work gives. Called inside a loop; other loops run meanwhile."""
        return self._hub.switch(wanted)

    @torch.inference_mode()
    def run(
        self,
        loops: Sequence[Callable[[], Result]],
        ended: Callable[[int], None] = lambda index: None,
    ) -> list[Ended[Result]]:
        """Run all loops, the first ones first.

        ended: called with each loop's index when it ends. Raises RuntimeError, naming the example,
        if a loop fails.
        """
        if self._hub is not None:
            raise RuntimeError("a batch runs one list of texts at a time")
        self._hub = greenlet.getcurrent()
        try:
            return _Run(self, loops, ended).all()
        finally:
            self._hub = None


@dataclass
class _Run:
    """One run of a batch. active: texts that have a place. early: texts that have begun without
    one.
    """

    batch: Batch
    loops: Sequence[Callable[[], Any]]
    ended: Callable[[int], None]
    active: list[_Text] = field(default_factory=list)
    early: deque[_Text] = field(default_factory=deque)
    results: dict[int, Ended[Any]] = field(default_factory=dict)
    begun: int = 0

    def all(self) -> list[Ended[Any]]:
        try:
            while len(self.results) < len(self.loops):
                self._fill()
                if self.active:
                    self._step()
        finally:
            for text in [*self.active, *self.early]:
                if not text.loop.dead:
                    text.loop.throw(greenlet.GreenletExit)
        return [self.results[index] for index in range(len(self.loops))]

    def _fill(self) -> None:
        """Give free places to texts, those that began early first."""
        while len(self.active) < self.batch.size and (self.early or self.begun < len(self.loops)):
            text = self.early.popleft() if self.early else self._begin()
            text.joined = time.perf_counter() if text.joined is None else text.joined
            if text.index not in self.results:
                self.active.append(text)

    def _begin(self) -> _Text:
        index, self.begun = self.begun, self.begun + 1
        loop = self.loops[index]
        text = _Text(index, Loop(lambda _: loop(), self.batch._hub))
        text.loop.batch = self.batch
        self._switch(text, None)
        text.before_s = text.share_s
        return text

    def _step(self) -> None:
        """Run sources first, so that no place is idle; then what the largest group wants of the
        smallest model.
        """
        groups: dict[Hashable, list[_Text]] = {}
        for text in self.active:
            groups.setdefault(text.wanted.key, []).append(text)
        group = min(
            groups.values(),
            key=lambda texts: (not (of := texts[0].wanted).ahead, of.size, -len(texts)),
        )
        key = group[0].wanted.key
        if group[0].wanted.ahead:
            self._begin_early(min(self.batch.size, MOST_AHEAD) - len(group))
            group = [*group, *(text for text in self.early if text.wanted.key == key)][:MOST_AHEAD]
        self.batch.sizes.append((key, len(group)))
        started = time.perf_counter()
        found = group[0].wanted.run([text.wanted.work for text in group])
        self.batch.synchronize()
        seconds = time.perf_counter() - started
        for text, each in zip(group, found, strict=True):
            text.share_s += seconds / len(group)
            if text.joined is None:
                text.before_s += seconds
            self._switch(text, each)
        self.active = [text for text in self.active if text.index not in self.results]
        self.early = deque(text for text in self.early if text.index not in self.results)

    def _begin_early(self, most: int) -> None:
        """Begin texts whose sources are encoded with those of the texts that just got a place."""
        while len(self.early) < most and self.begun < len(self.loops):
            text = self._begin()
            if text.index not in self.results:  # one whose every row is on record never waits
                self.early.append(text)

    def _switch(self, text: _Text, value: Any) -> None:
        """Let a text's loop go on until it waits again or ends."""
        started = time.perf_counter()
        try:
            answer = text.loop.switch(value)
        except UserError:
            raise
        except Exception as error:
            raise RuntimeError(f"example {text.index}: {error}") from error
        now = time.perf_counter()
        text.share_s += now - started
        if not text.loop.dead:
            text.wanted = answer
            return
        latency_s = text.before_s + (0.0 if text.joined is None else now - text.joined)
        self.results[text.index] = Ended(answer, latency_s, text.share_s)
        self.ended(text.index)
