"""Triton kernels of a few numbers, whose accesses to memory have an order or lack it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_first(numbers):
    """Each program writes its number in one place. Grid: (programs)."""
    tl.store(numbers, tl.program_id(0))


@triton.jit
def write_own(numbers, WIDTH: tl.constexpr):
    """Each program writes WIDTH numbers of its own. Grid: (programs)."""
    tl.store(numbers + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(0))


@triton.jit
def write_twice(numbers, WIDTH: tl.constexpr):
    """One store gives a place several numbers. Grid: (1)."""
    tl.store(numbers + tl.arange(0, WIDTH) // 2, tl.arange(0, WIDTH))


@triton.jit
def sum_in_turn(
    numbers,
    tickets,
    total,
    programs,
    BARRIER: tl.constexpr,
    SEMANTICS: tl.constexpr,
    SCOPE: tl.constexpr,
):
    """The program that takes the last ticket adds what all have written. Grid: (programs)."""
    program = tl.program_id(0)
    tl.store(numbers + program, program + 1)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(tickets, 1, sem=SEMANTICS, scope=SCOPE) == programs - 1:
        result = 0
        for index in range(programs):
            result += tl.load(numbers + index)
        tl.store(total, result)


@triton.jit
def sum_by_several_tickets(
    numbers, tickets, total, programs, taken, WIDTH: tl.constexpr, BARRIER: tl.constexpr
):
    """The same with the first `taken` of WIDTH tickets, each of which a thread takes for itself.
    Grid: (programs).
    """
    program = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    tl.store(numbers + program * WIDTH + lane, program + 1)
    tl.debug_barrier()
    ended = tl.atomic_add(tickets + lane, 1, mask=lane < taken, sem="acq_rel")
    if tl.max(tl.where(lane < taken, ended, 0), 0) == programs - 1:
        if BARRIER:
            tl.debug_barrier()
        result = tl.zeros((WIDTH,), tl.int64)
        for index in range(programs):
            result += tl.load(numbers + index * WIDTH + (lane + 1) % WIDTH)
        tl.store(total + lane, result)


@triton.jit
def count_up(numbers, BARRIER: tl.constexpr):
    """A number that all threads read, and one of them writes. Grid: (1)."""
    number = tl.load(numbers)
    if BARRIER:
        tl.debug_barrier()
    tl.store(numbers, number + 1)


@triton.jit
def add_one(numbers, WIDTH: tl.constexpr):
    """Each thread reads and writes its own number. Grid: (1)."""
    lane = tl.arange(0, WIDTH)
    tl.store(numbers + lane, tl.load(numbers + lane) + 1)


@triton.jit
def double_other_half(numbers, WIDTH: tl.constexpr, BARRIER: tl.constexpr):
    """Threads of the first half read what those of the second half write. Grid: (1)."""
    lane = tl.arange(0, WIDTH)
    half = WIDTH // 2
    number = tl.load(numbers + lane, mask=lane < half, other=0)
    if BARRIER:
        tl.debug_barrier()
    tl.store(numbers + lane - half, 2 * tl.sum(number, 0), mask=lane >= half)


@triton.jit
def copy_next(
    source,
    target,
    EARLY: tl.constexpr,
    WAITS: tl.constexpr,
    FIRST_WAITS: tl.constexpr,
    SIGNALS: tl.constexpr,
):
    """A number, which is read before this kernel waits if EARLY. Grid: (1).

    WAITS: whether it waits at all. SIGNALS: whether it lets the next kernel begin before it ends;
    FIRST_WAITS: after it has waited.
    """
    if SIGNALS and not FIRST_WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY:
        number = tl.load(source)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    if SIGNALS and FIRST_WAITS:
        tl.extra.cuda.gdc_launch_dependents()
    if not EARLY:
        number = tl.load(source)
    tl.store(target, number)


@triton.jit
def write_same(numbers, WIDTH: tl.constexpr):
    """One store gives each place the same number twice. Grid: (1)."""
    tl.store(numbers + tl.arange(0, WIDTH) // 2, tl.arange(0, WIDTH) // 2)


@triton.jit
def write_before_turn(numbers, tickets):
    """Each program writes one place before it takes a ticket. Grid: (programs)."""
    tl.store(numbers, tl.program_id(0))
    tl.debug_barrier()
    tl.atomic_add(tickets, 1, sem="acq_rel")


@triton.jit
def pass_on(numbers, turns, tickets, ASKED: tl.constexpr):
    """The third program to run reads what the first wrote: it takes the ticket ASKED, and the second
    has taken that of the first and then ticket 1. Grid: (3).
    """
    turn = tl.atomic_add(turns, 1, sem="relaxed")
    if turn == 0:
        tl.store(numbers, 7)
        tl.debug_barrier()
        tl.atomic_add(tickets, 1, sem="acq_rel")
    if turn == 1:
        tl.atomic_add(tickets, 1, sem="acq_rel")
        tl.atomic_add(tickets + 1, 1, sem="acq_rel")
    if turn == 2:
        tl.atomic_add(tickets + ASKED, 1, sem="acq_rel")
        tl.store(numbers + 1, tl.load(numbers))


@triton.jit
def ask_for_the_later_first(numbers, turns, tickets):
    """The first program to run takes a ticket after each of two numbers, and the second takes the
    later one before the earlier one. Grid: (2).
    """
    turn = tl.atomic_add(turns, 1, sem="relaxed")
    if turn == 0:
        tl.store(numbers, 7)
        tl.debug_barrier()
        tl.atomic_add(tickets, 1, sem="acq_rel")
        tl.store(numbers + 1, 7)
        tl.debug_barrier()
        tl.atomic_add(tickets + 1, 1, sem="acq_rel")
    if turn == 1:
        tl.atomic_add(tickets + 1, 1, sem="acq_rel")
        tl.atomic_add(tickets, 1, sem="acq_rel")
        tl.store(numbers + 2, tl.load(numbers + 1))


@triton.jit
def read_unasked(numbers, tickets):
    """The second program reads what the first writes, whether or not it has run. Grid: (2)."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(numbers, 7)
        tl.debug_barrier()
    tl.atomic_add(tickets, 1, sem="acq_rel")
    if program == 1:
        tl.store(numbers + 1, tl.load(numbers))


@triton.jit
def add_one_below(numbers, count, WIDTH: tl.constexpr):
    """Each thread below count reads and writes its own number; others ask for different places, and
    get none. Grid: (1).
    """
    lane = tl.arange(0, WIDTH)
    number = tl.load(numbers + tl.where(lane < count, lane, 0), mask=lane < count, other=0)
    tl.store(numbers + lane, number + 1, mask=lane < count)


@triton.jit
def read_own_and_next(numbers, sums, WIDTH: tl.constexpr):
    """Each thread writes its number, reads it, and then reads that of the next. Grid: (1)."""
    lane = tl.arange(0, WIDTH)
    tl.store(numbers + lane, lane)
    own = tl.load(numbers + lane)
    tl.store(sums + lane, own + tl.load(numbers + (lane + 1) % WIDTH))


@triton.jit
def count_up_by_half(numbers, halves):
    """A number whose second half all threads read, and one of them writes all of it. Grid: (1)."""
    half = tl.load(halves + 1)
    tl.store(numbers, half + 1)


@triton.jit
def wait_in_first(numbers):
    """Only the first program waits for the kernel before. Grid: (programs)."""
    if tl.program_id(0) == 0:
        tl.extra.cuda.gdc_wait()
    tl.store(numbers + tl.program_id(0), 1)
