"""What the pretended GPU keeps account of: memory, streams, waits of the host and the graph that is
being captured.

Streams are ordered by vector clocks. An operation is known to a stream if the stream ran it itself,
has waited for it, or if the host has waited for it before. Memory that is used before its last use
on another stream is known is a race.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

HERE = str(Path(__file__).parent)
REPOSITORY = str(Path(__file__).parents[2])
Clock = dict[int, int]  # how far each stream is known to be done


class CudaFault(RuntimeError):
    """An operation that fails on CUDA, or that gives wrong values there."""


@dataclass(frozen=True)
class Wait:
    """The host waited for the device. line: the innermost of our own. within: the innermost outside
    torch.
    """

    what: str
    line: str
    within: str

    def __str__(self) -> str:
        return f"{self.what} at {self.line}" + (
            "" if self.within == self.line else f" (in {self.within})"
        )


# a part of an allocation: its first byte, and the one behind its last
Extent = tuple["Memory", int, int]


@dataclass(frozen=True)
class Use:
    """What one operation did to a part of an allocation."""

    first: int
    end: int
    stream: int
    time: int
    wrote: bool


class Memory:
    """One allocation of the device, shared by all views of it, with which it dies. home: the stream
    that made it.
    """

    def __init__(self, home: Stream) -> None:
        self.home = home
        self.uses: list[Use] = []

    def use(self, stream: Stream, first: int, end: int, writes: bool) -> None:
        """Raise for a race with another stream, and remember the use."""
        left = []
        for each in self.uses:
            if each.stream != stream.id and not stream.knows(each.stream, each.time):
                left.append(each)
                if (writes or each.wrote) and each.first < end and first < each.end:
                    doing = "writes" if writes else "reads"
                    done = "writing" if each.wrote else "reading"
                    raise CudaFault(
                        f"a stream {doing} what another has not finished {done}; wait for its event"
                        " first"
                    )
            elif each.stream == stream.id and not (
                first <= each.first and each.end <= end and writes >= each.wrote
            ):
                left.append(each)
        self.uses = [*left, Use(first, end, stream.id, stream.time, writes)]

    def __del__(self) -> None:
        left = {
            each.stream: each.time
            for each in self.uses
            if not self.home.knows(each.stream, each.time)
        }
        if left:
            self.home.freed.append(left)


class Stream:
    """A queue of work. freed: uses by other streams of memory that the next allocation here could
    be given.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.id = machine, len(machine.streams)
        machine.streams.append(self)
        self.time = 0
        self.known: Clock = {}
        self.freed: list[Clock] = []

    def knows(self, stream: int, time: int) -> bool:
        return (
            stream == self.id
            or max(self.known.get(stream, 0), self.machine.host.get(stream, 0)) >= time
        )

    def learn(self, clock: Clock) -> None:
        for stream, time in clock.items():
            self.known[stream] = max(self.known.get(stream, 0), time)

    @property
    def clock(self) -> Clock:
        return {**self.known, self.id: self.time}

    def launch(self, reads: list[Extent], writes: list[Extent], allocates: bool) -> None:
        """Run one operation behind the stream's others."""
        self.time += 1
        if len(self.machine.streams) == 1:
            return
        if allocates and self.freed:
            if any(
                not self.knows(stream, time) for used in self.freed for stream, time in used.items()
            ):
                raise CudaFault(
                    "memory was freed while another stream still used it, and may be given out"
                    " again here"
                )
            self.freed.clear()
        for memory, first, end in reads:
            memory.use(self, first, end, writes=False)
        for memory, first, end in writes:
            memory.use(self, first, end, writes=True)


@dataclass
class Copy:
    """A copy between host and device that the host did not wait for.

    host: the pinned memory. values: what arrives in it or, towards the device, what it held when
    the copy began.
    """

    host: weakref.ref[torch.Tensor]
    values: torch.Tensor
    stream: int
    time: int
    to_host: bool


@dataclass
class Capture:
    """A graph that is being captured.

    inside, outside: memory that was allocated in the capture, and other memory that it uses.
    before: what outside memory held before the capture wrote to it. born: the values of what was
    allocated.
    """

    stream: Stream
    calls: list[Any] = field(default_factory=list)
    inside: dict[int, Memory] = field(default_factory=dict)
    born: list[torch.Tensor] = field(default_factory=list)
    outside: dict[int, weakref.ref[Memory]] = field(default_factory=dict)
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    generators: tuple[int, ...] = ()  # addresses


class Machine:
    """The account of one pretended GPU."""

    def __init__(self) -> None:
        self.host: Clock = {}  # what the host has waited for
        self.streams: list[Stream] = []
        self.current = self.default = Stream(self)
        self.waits: list[Wait] = []
        self.capture: Capture | None = None
        self.copies: list[Copy] = []
        self.launched = 0

    def wait(self, what: str, clock: Clock | None = None) -> None:
        """The host waits: for the current stream, or for what a clock says."""
        line, within = called_from()
        if self.capture is not None:
            raise CudaFault(f"a graph is being captured, and the host waits: {what} at {line}")
        self.waits.append(Wait(what, line, within))
        for stream, time in (self.current.clock if clock is None else clock).items():
            self.host[stream] = max(self.host.get(stream, 0), time)
        self.finish_copies()

    def wait_for_all(self, what: str) -> None:
        self.wait(what, {stream.id: stream.time for stream in self.streams})

    def finish_copies(self) -> None:
        """Complete the copies that the host now knows to be done."""
        if self.copies:
            with _disable_current_modes():
                self._finish_copies()

    def _finish_copies(self) -> None:
        left = []
        for copy in self.copies:
            if self.host.get(copy.stream, 0) < copy.time:
                left.append(copy)
            elif (host := copy.host()) is None:
                continue
            elif copy.to_host:
                host.copy_(copy.values)
            elif not torch.equal(host, copy.values):
                raise CudaFault(
                    "pinned memory was written to before its copy to the device was done"
                )
        self.copies = left

    def require_copied(self, tensor: torch.Tensor) -> None:
        """Raise unless the host may read this memory of its own."""
        for copy in self.copies:
            host = copy.host()
            if copy.to_host and host is not None and same_memory(host, tensor):
                raise CudaFault(
                    f"the host reads at {called_from()[0]} what has not been copied yet; wait for"
                    " the copy first"
                )

    @contextmanager
    def counting(self) -> Iterator[list[Wait]]:
        """The waits inside."""
        before, found = len(self.waits), []
        yield found
        found += self.waits[before:]


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def called_from() -> tuple[str, str]:
    """The innermost line of the repository outside this package, and the innermost one outside
    torch.
    """
    frame, within = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(HERE) and not Path(name).name.startswith("test_")
        if not ours and "/torch/" not in name and not name.startswith("<"):
            shown = (
                Path(name).relative_to(REPOSITORY)
                if name.startswith(REPOSITORY)
                else Path(name).name
            )
            place = f"{shown}:{frame.f_lineno}"
            within = within or place
            if name.startswith(REPOSITORY) and "/site-packages/" not in name:
                return place, within
        frame = frame.f_back
    return within or "?", within or "?"


def by_line(waits: list[Wait]) -> Counter[str]:
    """How often the host waited at each line, for messages."""
    return Counter(map(str, waits))
