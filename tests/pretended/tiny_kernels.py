"""Triton kernels of a few numbers, for the tests of the pretended GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_scaled(source, target, factor, COUNT: tl.constexpr):
    """Write float32 numbers times a factor. Grid: ()."""
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at) * factor)


@triton.jit
def follow(addresses, target, COUNT: tl.constexpr):
    """Copy the float32 numbers that begin at the first of these addresses. Grid: ()."""
    at = tl.arange(0, COUNT)
    source = tl.load(addresses).to(tl.pointer_type(tl.float32))
    tl.store(target + at, tl.load(source + at))


@triton.jit
def count_down(running, ended, AFTER_ITS_TURN: tl.constexpr):
    """Each program takes one from an int64 number, and says whether it is 0. Grid: (programs).

    AFTER_ITS_TURN: it reads the number then; else before, while other programs may write it.
    """
    program = tl.program_id(0)
    if AFTER_ITS_TURN:
        tl.atomic_add(running, -1, sem="acq_rel")
    tl.store(ended + program, tl.load(running) == 0)
    if not AFTER_ITS_TURN:
        tl.atomic_add(running, -1, sem="acq_rel")
