"""The Triton kernel of attention, to a text's own slots or to an encoder's memory."""

from __future__ import annotations

import triton
import triton.language as tl

from bild_lab.engine.models.native.gpu.products import (
    ROW_POSITION,
    ROW_TOKEN,
    TEXT_CAPACITY,
    TEXT_FIELDS,
    TEXT_FRESH,
    TEXT_KEYS,
    TEXT_RESERVED,
    TEXT_SOURCE,
    TEXT_SOURCE_KEYS,
    TEXT_SOURCE_VALUES,
    TEXT_TREE_START,
    TEXT_VALUES,
    start_next,
    wait_for_previous,
)

LANES = tl.constexpr(16)  # queries of a program, of one text and one head of keys
TOGETHER = tl.constexpr(4)  # chunks whose results are loaded at once
HIDDEN_SCORE = tl.constexpr(-1e30)  # of a slot that a query does not see


@triton.jit(do_not_specialize=["layer", "window"])
def attend(
    running,
    row_table,
    text_table,
    tile_table,
    paths,
    distance_bias,
    queries,
    mixed,
    partial,
    statistics,
    tickets,
    layer,
    window,
    farthest,
    known,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BIASED: tl.constexpr,
    CROSS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attention of LANES queries to one chunk of slots; the program of a head that ends last merges
    its chunks.

    Grid: (heads of keys, tiles of queries, chunks). A program without a tile or a chunk leaves at
    once. Old keys and values, masks and biases are read while the kernel before still runs.

    Every row attends as the row of a chain, whose keys lie one after the other: chunk c is always
    the keys from c · CHUNK on, and chunks are merged in order. So a row's bits depend neither on the
    rows beside it nor on where the rows of a tree lie. TREE: a tile has the queries of one row, and
    `paths`, [rows, MAX_DEPTH], says which row of the tree each of its ancestors is, by depth.

    tile_table: of each tile its text, or −1, its first query, and the first that it lacks; query q
    is head q % group of row q // group. distance_bias: [heads, farthest + 1], by position of the
    query minus that of the key, times log2(e), as is `scale`. CROSS: the keys are those of the
    source, and all are seen. HAS_PREFIX: rows of tokens from `known` on see the reserved slots, and
    no other rows do.
    """
    start_next(OVERLAP)
    if STOPPABLE:
        if tl.load(running, cache_modifier=".cg") == 0:
            return
    head, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    element: tl.constexpr = queries.dtype.element_ty
    # 1. the text, and the chunks that its rows may see
    text = tl.load(tile_table + 3 * tile, cache_modifier=".cg")
    if text < 0:
        return
    first_query = tl.load(tile_table + 3 * tile + 1, cache_modifier=".cg").to(tl.int32)
    last_query = tl.load(tile_table + 3 * tile + 2, cache_modifier=".cg").to(tl.int32)
    fields = text_table + text * TEXT_FIELDS
    reserved = tl.load(fields + TEXT_RESERVED, cache_modifier=".cg").to(tl.int32)
    tree_start = tl.load(fields + TEXT_TREE_START, cache_modifier=".cg").to(tl.int32)
    positions = row_table + ROW_POSITION * MAX_ROWS
    first_chunk = 0
    if CROSS:
        capacity = tl.load(fields + TEXT_SOURCE, cache_modifier=".cg")
        key_address = tl.load(fields + TEXT_SOURCE_KEYS, cache_modifier=".cg")
        value_address = tl.load(fields + TEXT_SOURCE_VALUES, cache_modifier=".cg")
        fresh = capacity.to(tl.int32)
        end = fresh
    else:
        capacity = tl.load(fields + TEXT_CAPACITY, cache_modifier=".cg")
        key_address = tl.load(fields + TEXT_KEYS, cache_modifier=".cg")
        value_address = tl.load(fields + TEXT_VALUES, cache_modifier=".cg")
        fresh = tl.load(fields + TEXT_FRESH, cache_modifier=".cg").to(tl.int32)
        # the last row of a tile, or the only one, sees most
        last_position = tl.load(positions + (last_query - 1) // group, cache_modifier=".cg")
        end = last_position.to(tl.int32) + reserved + 1
        if WINDOWED and not HAS_PREFIX:
            first_position = tl.load(positions + first_query // group, cache_modifier=".cg")
            first_chunk = tl.maximum(first_position.to(tl.int32) + 1 - window, 0) // CHUNK
    chunks = tl.cdiv(end, CHUNK) - first_chunk
    if part >= chunks:
        return
    # 2. its queries, its keys, and the slots where these lie
    lane = tl.arange(0, LANES)
    query = first_query + lane
    real = query < last_query
    row = query // group
    query_head = head * group + query % group
    column = tl.arange(0, HEAD_BLOCK)
    real_columns = column < HEAD_DIM
    key_number = (first_chunk + part) * CHUNK + tl.arange(0, CHUNK)
    slot = key_number
    if TREE and not CROSS:
        depth = key_number - tree_start
        below = (depth >= 0) & (key_number < end)
        path = paths + first_query // group * MAX_DEPTH + depth
        in_tree = tl.load(path, mask=below, other=0, cache_modifier=".cg").to(tl.int32)
        slot = tl.where(below, tree_start + in_tree, slot)
    first_number = (layer * KV_HEADS + head) * capacity * HEAD_DIM
    numbers = slot[:, None] * HEAD_DIM + column[None, :]
    # caches begin at a multiple of 16 bytes, so that many numbers are loaded at once
    key_cache = tl.multiple_of(key_address.to(tl.pointer_type(element)), 16)
    value_cache = tl.multiple_of(value_address.to(tl.pointer_type(element)), 16)
    keys = key_cache + first_number + numbers
    values = value_cache + first_number + numbers
    # 3. what no kernel of this forward writes
    old = (slot < fresh) & (key_number < end)
    stored = old[:, None] & real_columns[None, :]
    key = tl.load(keys, mask=stored, other=0.0, cache_modifier=".cg")
    value = tl.load(values, mask=stored, other=0.0, cache_modifier=".cg")
    if CROSS:
        visible = real[:, None] & old[None, :]
    else:
        position = tl.load(positions + row, mask=real, other=-1, cache_modifier=".cg").to(tl.int32)
        key_position = key_number - reserved
        distance = position[:, None] - key_position[None, :]
        visible = real[:, None] & (distance >= 0)
        if HAS_PREFIX:
            token = tl.load(
                row_table + ROW_TOKEN * MAX_ROWS + row, mask=real, other=0, cache_modifier=".cg"
            )
            visible = visible & ((token >= known)[:, None] | (key_position >= 0)[None, :])
        if WINDOWED:  # a prefix has no position
            visible = visible & ((distance < window) | (key_position < 0)[None, :])
        if BIASED:
            clipped = tl.minimum(tl.maximum(distance, 0), farthest)
            bias = tl.load(
                distance_bias + query_head[:, None] * (farthest + 1) + clipped,
                mask=visible,
                other=0.0,
            )
    # 4. queries, and the keys and values of this forward
    wait_for_previous(OVERLAP)
    at = (row * HEADS + query_head)[:, None] * HEAD_DIM + column[None, :]
    present = real[:, None] & real_columns[None, :]
    query_rows = tl.load(queries + at, mask=present, other=0.0, cache_modifier=".cg")
    if not CROSS:
        new = ((slot >= fresh) & (key_number < end))[:, None] & real_columns[None, :]
        key = tl.where(new, tl.load(keys, mask=new, other=0.0, cache_modifier=".cg"), key)
        value = tl.where(new, tl.load(values, mask=new, other=0.0, cache_modifier=".cg"), value)
    # 5. softmax and the mixed values of this chunk
    scores = tl.dot(query_rows, tl.trans(key), input_precision="ieee") * scale
    if BIASED:
        scores += bias
    scores = tl.where(visible, scores, HIDDEN_SCORE)
    top = tl.max(scores, 1)
    weights = tl.where(visible, tl.exp2(scores - top[:, None]), 0.0)
    total = tl.where(real, tl.sum(weights, 1), 1.0)
    mix = tl.dot(weights.to(element), value, input_precision="ieee")
    if chunks == 1:
        tl.store(mixed + at, (mix / total[:, None]).to(element), mask=present)
        return
    # 6. the sum of all chunks, by the last program of this head and tile
    place = head * tl.num_programs(1) + tile
    all_chunks = tl.num_programs(2)
    inner = lane[:, None] * HEAD_BLOCK + column[None, :]
    chunk_size: tl.constexpr = LANES * HEAD_BLOCK
    results = partial + place * all_chunks * chunk_size
    tops = statistics + place * all_chunks * (2 * LANES) + lane
    tl.store(results + part * chunk_size + inner, mix, mask=present)
    tl.store(tops + part * (2 * LANES), top)
    tl.store(tops + part * (2 * LANES) + LANES, total)
    tl.debug_barrier()
    if tl.atomic_add(tickets + place, 1, sem="acq_rel") == chunks - 1:
        highest = tl.full((LANES,), HIDDEN_SCORE, tl.float32)
        for chunk in range(0, chunks, TOGETHER):
            for offset in tl.static_range(TOGETHER):
                ran = (chunk + offset < chunks) & (lane >= 0)
                at_top = tops + (chunk + offset) * (2 * LANES)
                top = tl.load(at_top, mask=ran, other=HIDDEN_SCORE, cache_modifier=".cg")
                highest = tl.maximum(highest, top)
        merged = tl.zeros((LANES, HEAD_BLOCK), tl.float32)
        whole = tl.zeros((LANES,), tl.float32)
        for chunk in range(0, chunks, TOGETHER):
            for offset in tl.static_range(TOGETHER):
                ran = (chunk + offset < chunks) & (lane >= 0)
                at_top = tops + (chunk + offset) * (2 * LANES)
                top = tl.load(at_top, mask=ran, other=HIDDEN_SCORE, cache_modifier=".cg")
                total = tl.load(at_top + LANES, mask=ran, other=0.0, cache_modifier=".cg")
                mix = tl.load(
                    results + (chunk + offset) * chunk_size + inner,
                    mask=present & (chunk + offset < chunks),
                    other=0.0,
                    cache_modifier=".cg",
                )
                weight = tl.exp2(top - highest)
                whole = tl.fma(weight, total, whole)
                merged = tl.fma(weight[:, None], mix, merged)
        tl.store(mixed + at, (merged / whole[:, None]).to(element), mask=present)
        tl.store(tickets + place, 0)
