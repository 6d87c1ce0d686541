"""Accesses to memory that the Triton kernels leave without an order.

Triton's interpreter runs the programs of a launch one after another, and each program as if it had
one thread. A GPU runs the programs of a launch in any order and side by side, and a program's
threads side by side between its barriers. From compute capability 9.0 on, what a kernel does before
it waits runs beside the kernels before it (programmatic dependent launch). `watch_memory` notes who
reads and writes what, and finds the pairs of accesses that nothing orders.

What orders two accesses:

- **of one program**: a barrier between them, or that both ask for the same places by the same
  addresses in the same order, of which each thread has its own, so that each place is one thread's.
  Of fewer addresses than threads several threads read each, so even a small tensor that is updated
  in place needs a barrier. One that the compiler adds for its own needs does not count.
- **of two programs of a launch**: a barrier after the first, then an atomic operation, then one of
  the other program on the same number (for a tensor of numbers then a barrier), then the second.
  Both operations release and acquire, for the whole GPU.
- **of two launches**: that the second waits for the first. A launch in turn waits as a whole. Of one
  that overlaps, only what follows the wait of its program has waited. What precedes it runs beside
  all launches since the last *fence*, a launch that waits before it lets the next one begin, or that
  began in turn. It runs beside the fence, too: even of a launch that has ended, only who waits for it
  is sure to see what it wrote.

Operations of PyTorch between launches are not seen, and order nothing here; on a GPU they order all.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest

UNIT = 2  # bytes: the smallest number that kernels write
THREADS_OF_WARP, WARPS = 32, 4  # Triton's number of warps where a launch gives none


@dataclass
class Access:
    """One operation of a program on memory.

    program: its place in the order in which the programs ran. barriers: how many it had passed, a
    half less for an atomic operation, which publishes itself. clock: of other programs, of how many
    barriers it knew. addresses: those asked for, in the operation's shape, 0 where it is masked.
    owned: whether there are as many as threads. units: of UNIT bytes that are touched, sorted.
    """

    program: int
    barriers: float
    clock: dict[int, float]
    waited: bool
    writes: bool
    atomic: bool
    addresses: np.ndarray
    owned: bool
    units: np.ndarray
    place: str

    def is_before(self, later: Access) -> bool:
        """Whether something orders this before a later access of the same launch."""
        if self.atomic and later.atomic:
            return True
        if self.program != later.program:
            return later.clock.get(self.program, -1.0) > self.barriers
        same_threads = self.owned and np.array_equal(self.addresses, later.addresses)
        return self.barriers < later.barriers or same_threads


@dataclass
class Running:
    """A program that runs. pending: what it learns at its next barrier."""

    index: int
    barriers: int = 0
    clock: dict[int, float] = field(default_factory=dict)
    pending: dict[int, float] = field(default_factory=dict)
    waited: bool = False
    lets_next_begin_early: bool = False  # before it has waited


@dataclass
class LaunchRecord:
    """What the programs of one launch did. threads: of each program. published: of each address of an
    atomic operation.
    """

    kernel: str
    overlaps: bool
    threads: int
    programs: list[Running] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    published: dict[int, dict[int, float]] = field(default_factory=dict)

    @property
    def is_fence(self) -> bool:
        """Whether all launches before this have ended when the next one begins."""
        return not any(program.lets_next_begin_early for program in self.programs)


class MemoryWatch:
    """What `watch_memory` found. conflicts: sentences, each once, in the order of discovery."""

    def __init__(self) -> None:
        self.conflicts: dict[str, None] = {}
        self._random = random.Random(0)
        self._grid: list[tuple[int, int, int]] = []
        self._record: LaunchRecord | None = None
        self._since_fence: list[LaunchRecord] = []

    # what runs

    def begin_launch(self, kernel: str, overlaps: bool, warps: int) -> None:
        """overlaps: it begins when the launch before it lets it, and else when that has ended."""
        self._record = LaunchRecord(kernel, overlaps, warps * THREADS_OF_WARP)

    def order_programs(self, grid: tuple[int, int, int]) -> None:
        """Choose the order in which the programs of a grid run: any may come."""
        self._grid = list(itertools.product(*map(range, grid)))
        self._random.shuffle(self._grid)

    def begin_program(self) -> tuple[int, int, int]:
        """The next program's place in the grid."""
        assert self._record is not None
        index = len(self._record.programs)
        self._record.programs.append(Running(index, waited=not self._record.overlaps))
        return self._grid[index]

    def end_launch(self) -> None:
        record, self._record = self._record, None
        assert record is not None
        for earlier, later in conflicting_pairs(record.accesses):
            if not earlier.is_before(later):
                whom = "one program's threads" if earlier.program == later.program else "programs"
                self._report(f"{record.kernel}: {whom}, {earlier.place} and {later.place}")
        if not any(program.waited for program in record.programs):
            self._report(f"{record.kernel}: it may end before the kernel before it")
        early = [access for access in record.accesses if not access.waited]
        for before in self._since_fence:
            for earlier, later in conflicting_pairs(before.accesses, early):
                self._report(
                    f"{record.kernel} before its wait and {before.kernel}: "
                    f"{later.place} and {earlier.place}"
                )
        if record.is_fence:
            self._since_fence = []
        self._since_fence.append(record)

    def _report(self, conflict: str) -> None:
        self.conflicts[conflict] = None

    # what a program does

    @property
    def _program(self) -> Running:
        assert self._record is not None
        return self._record.programs[-1]

    def barrier(self) -> None:
        program = self._program
        program.barriers += 1
        join(program.clock, program.pending)

    def wait(self) -> None:
        self._program.waited = True

    def let_next_begin(self) -> None:
        self._program.lets_next_begin_early |= not self._program.waited

    def access(
        self,
        pointers: np.ndarray,
        mask: np.ndarray,
        size: int,
        *,
        writes: bool,
        values: np.ndarray | None = None,
        atomic: bool = False,
        publishes: bool = False,
    ) -> None:
        """Note an operation. size: of a number, in bytes. publishes: it releases and acquires."""
        addresses, mask = np.broadcast_arrays(np.atleast_1d(pointers), np.atleast_1d(mask))
        touched = addresses[mask].astype(np.int64)
        if touched.size == 0:
            return
        place = place_in_source(sys._getframe(1))
        record, program = self._record, self._program
        assert record is not None
        if values is not None:
            self._require_one_value(touched, np.broadcast_to(values, mask.shape)[mask], place)
        offsets = np.arange(0, size, UNIT)
        units = np.unique((touched[:, None] + offsets[None, :]) // UNIT)
        record.accesses.append(
            Access(
                program.index,
                program.barriers - 0.5 * atomic,
                dict(program.clock),
                program.waited,
                writes,
                atomic,
                np.where(mask, addresses, 0),
                addresses.size >= record.threads,
                units,
                place,
            )
        )
        if publishes:
            learned = program.clock if addresses.size == 1 else program.pending
            for address in touched.tolist():
                published = record.published.setdefault(address, {})
                join(learned, published)
                join(published, {**program.clock, program.index: float(program.barriers)})

    def _require_one_value(self, addresses: np.ndarray, values: np.ndarray, place: str) -> None:
        """Note a store that gives one place two values."""
        order = np.argsort(addresses, kind="stable")
        addresses, values = addresses[order], values[order]
        same = addresses[1:] == addresses[:-1]
        if (same & (values[1:] != values[:-1])).any():
            self._report(f"{place} stores two values in one place")


def join(clock: dict[int, float], other: dict[int, float]) -> None:
    """Let a clock know what another knows."""
    for program, barriers in other.items():
        clock[program] = max(clock.get(program, -1.0), barriers)


def conflicting_pairs(
    accesses: list[Access], later: list[Access] | None = None
) -> Iterator[tuple[Access, Access]]:
    """Pairs of accesses that touch a common unit, of which at least one writes, in their order.

    later: pairs of one access each of both lists; None: pairs within one list.
    """
    both = accesses + (later or [])
    if not both:
        return
    counts = [access.units.size for access in both]
    owners = np.repeat(np.arange(len(both)), counts)
    units = np.concatenate([access.units for access in both])
    order = np.lexsort((owners, units))
    owners, units = owners[order], units[order]
    writes = np.array([access.writes for access in both])
    pairs: set[tuple[int, int]] = set()
    for distance in range(1, len(units)):
        same = units[distance:] == units[:-distance]
        if not same.any():
            break
        first, second = owners[:-distance][same], owners[distance:][same]
        relevant = writes[first] | writes[second]
        if later is not None:
            relevant &= (first < len(accesses)) & (second >= len(accesses))
        pairs.update(zip(first[relevant].tolist(), second[relevant].tolist(), strict=True))
    for first_index, second_index in sorted(pairs):
        yield both[first_index], both[second_index]


def place_in_source(frame: FrameType | None) -> str:
    """The line of the kernel, or of the function that it calls, that is being interpreted."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in ("/triton/", "/tests/triton_races", "/pretended/")):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


@contextmanager
def watch_memory() -> Iterator[MemoryWatch]:
    """Watch the kernels that Triton's interpreter runs inside this block.

    The programs of a launch run in a random order, and plans that are made inside the block overlap
    their kernels.
    """
    import triton.language as tl
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from bild_lab.engine.models.native.gpu import plan, products

    watch = MemoryWatch()
    patch = pytest.MonkeyPatch()

    def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        patch.setattr(
            owner, name, lambda *arguments, **named: wrapper(original, *arguments, **named)
        )

    def make_plan(original, self, *arguments, **named):
        original(self, *arguments, **named)
        self.overlap = True

    def run_grid(original, self, *arguments, **named):
        overlaps, warps = named.get("launch_pdl", False), named.get("num_warps", WARPS)
        watch.begin_launch(self.fn.__name__, overlaps, warps)
        result = original(self, *arguments, **named)
        watch.end_launch()
        return result

    def set_grid(original, self, *grid):
        original(self, *grid)
        watch.order_programs(grid)

    def set_place(original, self, *_):
        original(self, *watch.begin_program())

    def load(original, self, pointers, mask, *rest, **named):
        result = original(self, pointers, mask, *rest, **named)
        watch.access(pointers.data, mask.data, result.data.dtype.itemsize, writes=False)
        return result

    def store(original, self, pointers, value, mask, *rest, **named):
        size = value.data.dtype.itemsize
        watch.access(pointers.data, mask.data, size, writes=True, values=value.data)
        return original(self, pointers, value, mask, *rest, **named)

    def atomic(original, self, operation, pointers, value, mask, semantics, scope):
        watch.access(
            pointers.data,
            mask.data,
            value.data.dtype.itemsize,
            writes=True,
            atomic=scope.name != "CTA",  # that is the program alone
            publishes=semantics.name == "ACQUIRE_RELEASE" and scope.name != "CTA",
        )
        return original(self, operation, pointers, value, mask, semantics, scope)

    def barrier(original, self):
        watch.barrier()
        return original(self)

    wrap(plan.ForwardPlan, "__init__", make_plan)
    wrap(GridExecutor, "__call__", run_grid)
    wrap(InterpreterBuilder, "set_grid_dim", set_grid)
    wrap(InterpreterBuilder, "set_grid_idx", set_place)
    wrap(InterpreterBuilder, "create_masked_load", load)
    wrap(InterpreterBuilder, "create_masked_store", store)
    wrap(InterpreterBuilder, "create_atomic_rmw", atomic)
    wrap(InterpreterBuilder, "create_barrier", barrier)
    patch.setattr(tl.extra.cuda, "gdc_wait", watch.wait)
    patch.setattr(tl.extra.cuda, "gdc_launch_dependents", watch.let_next_begin)
    patch.setattr(products, "ask_ahead", lambda pointers: None)  # it reads nothing
    try:
        yield watch
    finally:
        patch.undo()
