"""Several texts at once: each text's loop runs as it is, and the forwards that they wait for run as
one.
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
# How many sources are encoded at once: more would pay no better, and their keys and values are large.
MAX_PREFETCHED = 16


@dataclass(frozen=True)
class PendingOp:
    """An operation that a text waits for. Operations with equal keys run as one.

    model_size: operations of smaller models run first, so that the target waits until every text
        needs it.
    run: takes the inputs of several texts and gives a result for each.
    input: of this text.
    prefetchable: the operation depends on the text's source alone, so it may run before the text
        has a slot in the batch.
    """

    key: Hashable
    model_size: int
    run: Callable[[list[Any]], Sequence[Any]]
    input: Any
    prefetchable: bool = False


@dataclass(frozen=True)
class FinishedLoop(Generic[Result]):
    """The result of a text's loop, and its seconds.

    latency_s: seconds from the moment when the text got its slot to its end, waits for other texts
    included. share_s: the text's share of the batch's seconds: what ran for it alone, and an equal
    share of what ran for several texts.
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
    """A text whose loop has begun.

    slot_time: when it got its slot; None before. prefetch_s: seconds of work that ran for it before
    that.
    """

    index: int
    loop: Loop
    pending: PendingOp | None = None
    slot_time: float | None = None
    prefetch_s: float = 0.0
    share_s: float = 0.0


class Batch:
    """Runs the loops of several texts side by side.

    A loop is any function. It runs in a greenlet, and stops in `wait` until its operation has run
    together with those of other texts. A text takes its slot as soon as another text has ended
    (continuous batching). size: how many texts decode at once. As many more may have begun, so that
    their encoders run together.

    synchronize: waits until the device has done its work, so that seconds go to those whose work it
    was.
    """

    def __init__(self, size: int, synchronize: Callable[[], None] = lambda: None) -> None:
        require_whole("the batch size", size, 1)
        self.size, self.synchronize = size, synchronize
        self._hub: greenlet.greenlet | None = None

    def wait(self, operation: PendingOp) -> Any:
        """The operation's result. Called inside a loop; other loops run meanwhile."""
        return self._hub.switch(operation)

    @torch.inference_mode()
    def run(
        self,
        loops: Sequence[Callable[[], Result]],
        on_end: Callable[[int], None] = lambda index: None,
    ) -> list[FinishedLoop[Result]]:
        """Run all loops, in order.

        on_end: called with each loop's index when it ends. Raises RuntimeError, naming the example,
        if a loop fails.
        """
        self._hub = greenlet.getcurrent()
        try:
            return _Run(self, loops, on_end).finish()
        finally:
            self._hub = None


@dataclass
class _Run:
    """One run of a batch.

    active: texts that have a slot.
    prefetched: texts that have begun without a slot.
    begun: how many loops have begun.
    """

    batch: Batch
    loops: Sequence[Callable[[], Any]]
    on_end: Callable[[int], None]
    active: list[_Text] = field(default_factory=list)
    prefetched: deque[_Text] = field(default_factory=deque)
    results: dict[int, FinishedLoop[Any]] = field(default_factory=dict)
    begun: int = 0

    def finish(self) -> list[FinishedLoop[Any]]:
        """Run until every loop has ended."""
        try:
            while len(self.results) < len(self.loops):
                self._fill_slots()
                if self.active:
                    self._run_next_group()
        finally:
            for text in [*self.active, *self.prefetched]:
                if not text.loop.dead:
                    text.loop.throw(greenlet.GreenletExit)
        return [self.results[index] for index in range(len(self.loops))]

    def _fill_slots(self) -> None:
        """Give free slots to texts, first to those that have begun."""
        while len(self.active) < self.batch.size and (
            self.prefetched or self.begun < len(self.loops)
        ):
            text = self.prefetched.popleft() if self.prefetched else self._begin()
            if text.slot_time is None:
                text.slot_time = time.perf_counter()
            if text.index not in self.results:
                self.active.append(text)

    def _begin(self) -> _Text:
        """Start the next loop, which runs until it waits or ends."""
        index = self.begun
        self.begun += 1
        loop = self.loops[index]
        text = _Text(index, Loop(lambda _: loop(), self.batch._hub))
        text.loop.batch = self.batch
        self._resume(text, None)
        text.prefetch_s = text.share_s
        return text

    def _run_next_group(self) -> None:
        """Run one operation for all texts that wait for it, and resume their loops."""
        group = self._next_group()
        operation = group[0].pending
        started = time.perf_counter()
        results = operation.run([text.pending.input for text in group])
        self.batch.synchronize()
        seconds = time.perf_counter() - started
        for text, result in zip(group, results, strict=True):
            text.share_s += seconds / len(group)
            if text.slot_time is None:
                text.prefetch_s += seconds
            self._resume(text, result)
        self.active = [text for text in self.active if text.index not in self.results]
        self.prefetched = deque(text for text in self.prefetched if text.index not in self.results)

    def _next_group(self) -> list[_Text]:
        """The texts whose equal operations run next.

        Sources are encoded first, so that no slot is idle. Then the smallest model runs, for the
        largest group that waits for it.
        """
        groups: dict[Hashable, list[_Text]] = {}
        for text in self.active:
            groups.setdefault(text.pending.key, []).append(text)

        def priority(group: list[_Text]) -> tuple[bool, int, int]:
            operation = group[0].pending
            return not operation.prefetchable, operation.model_size, -len(group)

        group = min(groups.values(), key=priority)
        operation = group[0].pending
        if not operation.prefetchable:
            return group
        self._prefetch(min(self.batch.size, MAX_PREFETCHED) - len(group))
        same_operation = [text for text in self.prefetched if text.pending.key == operation.key]
        return [*group, *same_operation][:MAX_PREFETCHED]

    def _prefetch(self, count: int) -> None:
        """Begin texts, so that their sources are encoded with those of texts that got a slot.

        count: how many texts may have begun without a slot.
        """
        while len(self.prefetched) < count and self.begun < len(self.loops):
            text = self._begin()
            # a text whose rows are all on record has ended without waiting
            if text.index not in self.results:
                self.prefetched.append(text)

    def _resume(self, text: _Text, value: Any) -> None:
        """Let a text's loop go on until it waits again or ends. value: what it waited for."""
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
            text.pending = answer
            return
        latency_s = text.prefetch_s
        if text.slot_time is not None:
            latency_s += now - text.slot_time
        self.results[text.index] = FinishedLoop(answer, latency_s, text.share_s)
        self.on_end(text.index)
