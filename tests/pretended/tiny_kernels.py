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
