"""Triton kernels at a forward's ends: what its rows begin with, and which tokens they end in."""

from __future__ import annotations

import triton
import triton.language as tl

from bild_lab.engine.models.native.gpu.products import (
    ROW_POSITION,
    ROW_SLOT,
    ROW_TOKEN,
    TEXT_FIELDS,
    TEXT_FRESH,
    load_squares,
    rms_factors,
    start_next,
    store_stream,
    wait_for_previous,
)


@triton.jit(do_not_specialize=["m", "known"])
def begin_stream(
    running,
    row_table,
    embedding,
    masks,
    states,
    next_norm,
    x,
    scaled,
    squares,
    m,
    dim,
    known,
    scale,
    FROM_STATES: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    GROUPS: tl.constexpr,
    RANGE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The embeddings of the rows' tokens begin the residual stream, or given states.

    Grid: (tiles of rows, tiles of columns). It waits before it lets the next kernel begin: when any
    later kernel of this forward begins, all that ran before this one is complete. masks: the
    embeddings of tokens from `known` on.
    """
    tile = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_rows = rows < m
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    norm_weights = tl.load(next_norm + columns, mask=columns < dim, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    start_next(OVERLAP)
    if STOPPABLE:
        if tl.load(running, cache_modifier=".cg") == 0:
            return
    present = real_rows[:, None] & (columns < dim)[None, :]
    if FROM_STATES:
        at = states + rows[:, None] * dim + columns[None, :]
        values = tl.load(at, mask=present, other=0.0, cache_modifier=".cg")
    else:
        token = tl.load(
            row_table + ROW_TOKEN * MAX_ROWS + rows, mask=real_rows, other=0, cache_modifier=".cg"
        )
        # padding has no slot, and a token of an earlier forward
        slot = tl.load(
            row_table + ROW_SLOT * MAX_ROWS + rows, mask=real_rows, other=-1, cache_modifier=".cg"
        )
        token = tl.where(slot >= 0, token, 0)
        is_word = token < known
        at = tl.where(is_word, token, 0)[:, None] * dim + columns[None, :]
        element: tl.constexpr = embedding.dtype.element_ty
        word = tl.load(embedding + at, mask=present & is_word[:, None], other=0.0).to(tl.float32)
        values = (word * scale).to(element).to(tl.float32)
        if HAS_MASKS:
            at = tl.where(is_word, 0, token - known)[:, None] * dim + columns[None, :]
            mask = tl.load(masks + at, mask=present & (token >= known)[:, None], other=0.0)
            values += mask.to(tl.float32)
    store_stream(
        values, norm_weights, x, scaled, squares, rows, real_rows, tile, dim, GROUPS, BLOCK_N, RANGE
    )


@triton.jit(do_not_specialize=["m"])
def add_normed(
    running,
    block,
    block_squares,
    block_norm,
    next_norm,
    x,
    scaled,
    squares,
    m,
    dim,
    epsilon,
    GROUPS: tl.constexpr,
    RANGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add a block's result, normed, to the residual stream (Gemma 3). Grid: as `begin_stream`."""
    start_next(OVERLAP)
    if STOPPABLE:
        if tl.load(running, cache_modifier=".cg") == 0:
            wait_for_previous(OVERLAP)
            return
    tile = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_rows = rows < m
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    present = real_rows[:, None] & (columns < dim)[None, :]
    weight = tl.load(block_norm + columns, mask=columns < dim, other=0.0).to(tl.float32)
    norm_weights = tl.load(next_norm + columns, mask=columns < dim, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    sums_of_squares = load_squares(block_squares, rows, real_rows, dim, GROUPS)
    factors = rms_factors(sums_of_squares, dim, epsilon, 1)
    at = rows[:, None] * dim + columns[None, :]
    before = tl.load(x + at, mask=present, other=0.0, cache_modifier=".cg")
    added = tl.load(block + at, mask=present, other=0.0, cache_modifier=".cg")
    values = before + added * factors[:, None] * weight[None, :]
    store_stream(
        values, norm_weights, x, scaled, squares, rows, real_rows, tile, dim, GROUPS, BLOCK_N, RANGE
    )


@triton.jit(do_not_specialize=["m"])
def copy_rows(
    running,
    source,
    target,
    m,
    dim,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copy rows of float32, [m, dim]. Grid: as `begin_stream`."""
    start_next(OVERLAP)
    if STOPPABLE:
        if tl.load(running, cache_modifier=".cg") == 0:
            wait_for_previous(OVERLAP)
            return
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    present = (rows < m)[:, None] & (columns < dim)[None, :]
    at = rows[:, None] * dim + columns[None, :]
    wait_for_previous(OVERLAP)
    numbers = tl.load(source + at, mask=present, other=0.0, cache_modifier=".cg")
    tl.store(target + at, numbers, mask=present)


@triton.jit
def sum_beside(tile_best, tile_sums, first, highest, tiles, TILES: tl.constexpr):
    """The sum of a row's exponentials, of which the largest is 1, from what `score` says of its
    tiles.

    first: where these begin. highest: the row's largest score.
    """
    at = tl.arange(0, TILES)
    total = tl.zeros((TILES,), tl.float32)
    for first_tile in range(0, tiles, TILES):
        present = first_tile + at < tiles
        place = first + first_tile + at
        value = tl.load(tile_best + place, mask=present, other=float("-inf"), cache_modifier=".cg")
        beside = tl.load(tile_sums + place, mask=present, other=0.0, cache_modifier=".cg")
        total += beside * tl.exp(value - highest)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["tiles", "step"])
def choose(
    running,
    tile_best,
    tile_tokens,
    tile_sums,
    picked,
    head_tokens,
    chain_table,
    thresholds,
    end_tokens,
    drafted,
    confidences,
    row_table,
    text_table,
    tiles,
    step,
    ADVANCES: tl.constexpr,
    PICKED: tl.constexpr,
    NARROW: tl.constexpr,
    TILES: tl.constexpr,
    END_TOKENS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    STEP_NUMBERS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Draft a token of each text's chain, and end the chain by the rule of `ChainProgress`.

    Grid: (texts). The token is the most likely, of equal ones the first, or, if PICKED, the one in
    `picked`. The next forward's row of the text gets it, one slot further if ADVANCES. `running`
    counts the chains that go on.

    head_tokens: of each of the head's outputs, if NARROW, its token. chain_table: [2, MAX_ROWS], of
    each chain how many steps remain, 0 after its end, and whether it has a threshold. thresholds:
    on the largest probability. end_tokens: [MAX_ROWS, END_TOKENS], of each chain, padded with −1.
    drafted, confidences: [steps, MAX_ROWS], STEP_NUMBERS from one step to the next.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    text = tl.program_id(0)
    remaining = tl.load(chain_table + text, cache_modifier=".cg")
    if remaining <= 0:
        return
    # 1. the largest score, its token, and its probability
    at = tl.arange(0, TILES)
    best = tl.full((TILES,), float("-inf"), tl.float32)
    token_at = tl.zeros((TILES,), tl.int32)
    for first_tile in range(0, tiles, TILES):
        present = first_tile + at < tiles
        place = text * tiles + first_tile + at
        value = tl.load(tile_best + place, mask=present, other=float("-inf"), cache_modifier=".cg")
        token = tl.load(tile_tokens + place, mask=present, other=0, cache_modifier=".cg")
        token_at = tl.where(value > best, token, token_at)
        best = tl.maximum(value, best)
    highest = tl.max(best, 0)
    confidence = 1.0 / sum_beside(tile_best, tile_sums, text * tiles, highest, tiles, TILES)
    if PICKED:
        chosen = tl.load(picked + text, cache_modifier=".cg")
    else:
        chosen = tl.min(tl.where(best == highest, token_at, 2147483647), 0).to(tl.int64)
        if NARROW:
            chosen = tl.load(head_tokens + chosen)
    tl.store(confidences + step * STEP_NUMBERS + text, confidence.to(tl.float64))
    tl.store(drafted + step * STEP_NUMBERS + text, chosen)
    # 2. whether the chain goes on
    has_threshold = tl.load(chain_table + MAX_ROWS + text, cache_modifier=".cg") != 0
    threshold = tl.load(thresholds + text, cache_modifier=".cg")
    falls_back = has_threshold & (confidence.to(tl.float64) < threshold)
    end_at = tl.arange(0, END_TOKENS)
    end_token = tl.load(end_tokens + text * END_TOKENS + end_at, cache_modifier=".cg")
    ends = tl.sum((end_token == chosen).to(tl.int32), 0) > 0
    goes_on = (remaining > 1) & (falls_back == 0) & (ends == 0)
    if ADVANCES:
        slot = tl.load(row_table + ROW_SLOT * MAX_ROWS + text, cache_modifier=".cg") + 1
        position = tl.load(row_table + ROW_POSITION * MAX_ROWS + text, cache_modifier=".cg") + 1
    tl.debug_barrier()  # all threads have read these tables
    tl.store(chain_table + text, tl.where(goes_on, remaining - 1, 0))
    if goes_on:
        # 3. the next forward's row of this text
        tl.store(row_table + ROW_TOKEN * MAX_ROWS + text, chosen)
        if ADVANCES:
            fields = text_table + text * TEXT_FIELDS
            tl.store(row_table + ROW_SLOT * MAX_ROWS + text, slot)
            tl.store(row_table + ROW_POSITION * MAX_ROWS + text, position)
            tl.store(fields + TEXT_FRESH, slot)
    else:
        tl.atomic_add(running, -1, sem="acq_rel")


@triton.jit(do_not_specialize=["parents", "paths", "positions", "first", "root_position"])
def trace_paths(parents, paths, positions, first, root_position, MAX_DEPTH: tl.constexpr):
    """Of each row of a tree from `first` on, its ancestors and itself by depth, and its position.

    Grid: (rows from `first` on). parents: as in `Tree`. paths: [rows, MAX_DEPTH].
    """
    row = tl.program_id(0)
    node = (first + row).to(tl.int64)
    depth = 0
    while node >= 0:
        node = tl.load(parents + node)
        depth += 1
    tl.store(positions + row, (root_position + depth - 1).to(tl.int64))
    node = (first + row).to(tl.int64)
    while node >= 0:
        depth -= 1
        tl.store(paths + row * MAX_DEPTH + depth, node)
        node = tl.load(parents + node)
