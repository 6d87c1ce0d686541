"""A Triton kernel that stores how states are rounded, for the tests."""

from __future__ import annotations

import triton
import triton.language as tl

from bild_lab.engine.models.native.gpu.blocks import GROUP, rounded


@triton.jit
def store_rounded(states, numbers, steps, GROUPS: tl.constexpr):
    """Round states, [GROUPS, 32]."""
    group = tl.arange(0, GROUPS)[None, :]
    at = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    whole, step = rounded(tl.load(states + at))
    tl.store(numbers + at, whole)
    tl.store(steps + group, step)
