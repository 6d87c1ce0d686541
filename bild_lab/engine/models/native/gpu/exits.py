"""The Triton kernel between two layers of a row that may leave early (CALM)."""

from __future__ import annotations

import triton
import triton.language as tl

from bild_lab.engine.models.native.gpu.products import store_stream, wait_for_previous

LEAST_NORM = tl.constexpr(1e-8)  # as in PyTorch's cosine


@triton.jit(do_not_specialize=["layers_before", "layers"])
def leave_if_confident(
    running,
    layers_run,
    exit_threshold,
    layer_input,
    next_norm,
    x,
    scaled,
    squares,
    layers_before,
    layers,
    dim,
    GROUPS: tl.constexpr,
    RANGE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The row leaves if the cosine of the last layer's output with its input exceeds the threshold:
    `running` is 0 from then on, and `layers_run` says how many layers ran.

    Grid: (1). layers_before: how many of `layers` came before; nothing is measured before the first
    and after the last. layer_input: [dim], what the last layer read. After the row has left, its
    state stays in `x`, and each next norm finds it, as a forward that begins with it would.

    Kernels read `running` before they wait, so the next one must begin after this one's end.
    """
    wait_for_previous(OVERLAP)
    row = tl.arange(0, 1)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * dim + column[None, :]
    real = at < dim
    was_running = (layers_before == 0) | (tl.load(running, cache_modifier=".cg") != 0)
    measured = was_running & (layers_before > 0) & (layers_before < layers)
    state = tl.load(x + at, mask=real, other=0.0, cache_modifier=".cg")
    measured_dim = tl.where(measured, dim, 0)
    before = tl.load(layer_input + at, mask=at < measured_dim, other=0.0, cache_modifier=".cg")
    norm_of_state = tl.sqrt(tl.sum(state * state))
    norm_before = tl.sqrt(tl.sum(before * before))
    norms = tl.maximum(norm_of_state, LEAST_NORM) * tl.maximum(norm_before, LEAST_NORM)
    cosine = tl.sum(state * before) / norms
    cosine = tl.where(cosine > 1.0, 1.0, cosine)  # NaN stays, and exceeds nothing
    leaves = measured & (cosine.to(tl.float64) > tl.load(exit_threshold, cache_modifier=".cg"))
    tl.debug_barrier()  # all warps have read `running`
    if layers_before == 0:
        tl.store(running, 1)
        tl.store(layers_run, layers)
    if leaves:
        tl.store(running, 0)
        tl.store(layers_run, layers_before)
    if was_running & (leaves == 0):
        tl.store(layer_input + at, state, mask=real)
    else:
        norm_weights = tl.load(next_norm + column, mask=column < dim, other=0.0).to(tl.float32)
        store_stream(
            state, norm_weights, x, scaled, squares, row, row == 0, 0, dim, GROUPS, BLOCK, RANGE
        )
