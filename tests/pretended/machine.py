"""What the pretended GPU keeps account of: memory, streams, waits of the host and the graph that is
being captured.

Every allocation has the address of the CPU's memory that holds its values.

Streams are ordered by vector clocks. An operation is known to a stream if the stream ran it itself,
has waited for it, or if the host has waited for it before. Memory that is used before its last use
on another stream is known is a race.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

HERE = str(Path(__file__).parent)
REPOSITORY = str(Path(__file__).parents[2])
STREAMS = 32  # that PyTorch gives out in turn
QUARANTINE = 4096  # freed allocations whose addresses are not given out again yet
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
CapturedExtent = tuple[weakref.ref["Memory"], int, int]


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
    that made it. storage: where its values lie. first, end: its addresses.
    """

    def __init__(self, home: Stream, storage: torch.UntypedStorage) -> None:
        self.home, self.storage = home, storage
        self.first = storage.data_ptr()
        self.end = self.first + storage.nbytes()
        self.uses: list[Use] = []
        home.machine.addresses.add(self)

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
            elif (
                each.stream == stream.id
                and not (first <= each.first and each.end <= end and writes >= each.wrote)
                and stream.machine.host.get(stream.id, 0) < each.time
            ):
                left.append(each)
        self.uses = [*left, Use(first, end, stream.id, stream.time, writes)]

    def __del__(self) -> None:
        self.home.machine.addresses.remove(self)
        left = {
            each.stream: each.time
            for each in self.uses
            if not self.home.knows(each.stream, each.time)
        }
        if left:
            self.home.freed.append(left)


class Addresses:
    """Which allocation an address lies in. freed: the last that died, so that no other takes their
    place, and a use of an old address is noticed.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []  # in order
        self._memories: dict[int, weakref.ref[Memory]] = {}
        self.freed: deque[torch.UntypedStorage] = deque(maxlen=QUARANTINE)

    def add(self, memory: Memory) -> None:
        if memory.first < memory.end:
            insort(self._firsts, memory.first)
            self._memories[memory.first] = weakref.ref(memory)

    def remove(self, memory: Memory) -> None:
        if memory.first < memory.end:
            del self._firsts[bisect_right(self._firsts, memory.first) - 1]
            del self._memories[memory.first]
            self.freed.append(memory.storage)

    def memory_at(self, address: int) -> Memory | None:
        """The allocation that is alive there."""
        place = bisect_right(self._firsts, address) - 1
        memory = self._memories[self._firsts[place]]() if place >= 0 else None
        return memory if memory is not None and address < memory.end else None


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
        """Run one operation behind the stream's others. What is captured runs at the replay."""
        if self.machine.capture is not None:
            return
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

    host: the pinned memory, which is not given out again before. values: what arrives in it or,
    towards the device, what it held when the copy began.
    """

    host: torch.Tensor
    values: torch.Tensor
    stream: int
    time: int
    to_host: bool


@dataclass(frozen=True)
class Operation:
    """One operation of a graph. run: does it again, on the memory as it then is. reads, writes:
    parts of memory, which a graph does not keep alive; of a kernel those are known when it runs.
    """

    run: Callable[[], None]
    reads: tuple[CapturedExtent, ...] = ()
    writes: tuple[CapturedExtent, ...] = ()


@dataclass
class Capture:
    """A graph that is being captured, or that was.

    stream: the one whose work it takes. operations: what it does. inside, outside: memory that was
    allocated in the capture, and other memory that it uses. before: what outside memory held before
    the capture wrote to it. born: the values of what was allocated. pool: memory that graphs of one
    pool share, and that each overwrites.
    """

    stream: Stream
    operations: list[Operation] = field(default_factory=list)
    inside: dict[int, Memory] = field(default_factory=dict)
    born: list[torch.Tensor] = field(default_factory=list)
    outside: dict[int, weakref.ref[Memory]] = field(default_factory=dict)
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    generators: tuple[int, ...] = ()  # addresses
    pool: Memory | None = None

    def uses(self, memories: list[Memory]) -> None:
        """Remember memory that was not allocated here."""
        outside = [memory for memory in memories if id(memory) not in self.inside]
        self.outside |= {id(memory): weakref.ref(memory) for memory in outside}


class Machine:
    """The account of one pretended GPU."""

    def __init__(self) -> None:
        self.host: Clock = {}  # what the host has waited for
        self.addresses = Addresses()
        self.streams: list[Stream] = []
        self.current = self.default = Stream(self)
        self.waits: list[Wait] = []
        self.capture: Capture | None = None
        self.capture_error_modes: set[str] = set()
        self.copies: list[Copy] = []
        self.launched = 0
        self.loaded: set[Hashable] = set()  # kernels, as they were compiled
        self.current_device = 0  # this one; all others are not there
        self.cublas: dict[int, Memory] = {}  # by the stream, what matrix products write to

    def wait(self, what: str, clock: Clock | None = None) -> None:
        """The host waits: for the current stream, or for what a clock says."""
        line, within = called_from()
        if self.capture is not None:
            raise CudaFault(f"a graph is being captured, and the host waits: {what} at {line}")
        self.waits.append(Wait(what, line, within))
        for stream, time in (self.current.clock if clock is None else clock).items():
            self.host[stream] = max(self.host.get(stream, 0), time)
        self.finish_copies()

    def require_device(self, device: Any = None) -> None:
        """Raise unless this device is meant, by its name or as the current one."""
        if device is None and self.current_device != 0:
            raise CudaFault(
                f"the current device is {self.current_device}, and the work is for device 0, at"
                f" {called_from()[0]}"
            )

    def wait_unless_known(self, what: str, clock: Clock) -> None:
        """The host waits, if it does not know yet that all this is done."""
        if self.capture is not None or any(
            self.host.get(stream, 0) < time for stream, time in clock.items()
        ):
            self.wait(what, clock)

    def wait_for_all(self, what: str) -> None:
        self.wait(what, {stream.id: stream.time for stream in self.streams})

    def cublas_memory(self) -> Memory:
        """What a matrix product of the current stream writes to, made at the first one."""
        number = self.current.id % STREAMS
        if number not in self.cublas:
            memory = self.cublas[number] = Memory(self.current, torch.UntypedStorage(1))
            if self.capture is not None:
                self.capture.inside[id(memory)] = memory
        return self.cublas[number]

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
            elif copy.to_host:
                copy.host.copy_(copy.values)
            elif not torch.equal(copy.host, copy.values):
                raise CudaFault(
                    "pinned memory was written to before its copy to the device was done"
                )
        self.copies = left

    def require_copied(self, tensor: torch.Tensor) -> None:
        """Raise unless the host may read this memory of its own."""
        for copy in self.copies:
            if copy.to_host and same_memory(copy.host, tensor):
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


def as_captured(extents: list[Extent]) -> tuple[CapturedExtent, ...]:
    return tuple((weakref.ref(memory), first, end) for memory, first, end in extents)


def alive(extents: tuple[CapturedExtent, ...]) -> list[Extent]:
    return [(memory(), first, end) for memory, first, end in extents]


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
