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


@triton.jit(do_not_specialize=["layer", "window", "tiles", "chunks", "tree_chunks"])
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
    tiles,
    chunks,
    tree_chunks,
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
    MAX_TILES: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attention of LANES queries to one chunk of slots; the program that ends last for a query
    merges the query's chunks.

    Grid: (programs, heads of keys), as only the first axis is long enough for long texts. `chunks`
    programs for each of `tiles` tiles of a text's queries; if TREE, `tree_chunks` after them for each
    tile of one row's queries. A program without a tile or a chunk leaves at once. Old keys and
    values, masks and biases are read while the kernel before still runs.

    Every row attends as the row of a chain, whose keys lie one after the other: chunk c is always
    the keys from c · CHUNK on, and chunks are merged in order. So a row's bits depend neither on the
    rows beside it nor on where the rows of a tree lie. Chunks that end before a tree begins are the
    same for all of its rows, which share a program. The others are a row's own: `paths`, [rows,
    MAX_DEPTH], says which row of the tree each of its ancestors is, by depth.

    tile_table: of each tile its text, or −1, its first query, and the first that it lacks; query q
    is head q % group of row q // group. The tiles of single rows of trees begin at line MAX_TILES.
    partial: [heads of keys, queries, chunks, HEAD_BLOCK]. statistics: of each of these results the
    largest score and the sum of the weights. distance_bias: [heads, farthest + 1], by position of
    the query minus that of the key, times log2(e), as is `scale`. CROSS: the keys are those of the
    source, and all are seen. HAS_PREFIX: rows of tokens from `known` on see the reserved slots, and
    no other rows do.
    """
    start_next(OVERLAP)
    if STOPPABLE:
        if tl.load(running, cache_modifier=".cg") == 0:
            wait_for_previous(OVERLAP)
            return
    program, head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    element: tl.constexpr = queries.dtype.element_ty
    # 1. the queries
    tile, part, of_one_row = program_tile(program, tiles, chunks, tree_chunks, TREE, MAX_TILES)
    text = tl.load(tile_table + 3 * tile, cache_modifier=".cg")
    if text < 0:
        return
    first_query = tl.load(tile_table + 3 * tile + 1, cache_modifier=".cg").to(tl.int32)
    last_query = tl.load(tile_table + 3 * tile + 2, cache_modifier=".cg").to(tl.int32)
    query = first_query + tl.arange(0, LANES)
    real = query < last_query
    row = query // group
    query_head = head * group + query % group
    # 2. how many keys each sees, and which of their chunks this program has
    fields = text_table + text * TEXT_FIELDS
    begin = 0
    first_chunk = tl.zeros((LANES,), tl.int32)
    if CROSS:
        capacity = tl.load(fields + TEXT_SOURCE, cache_modifier=".cg")
        key_address = tl.load(fields + TEXT_SOURCE_KEYS, cache_modifier=".cg")
        value_address = tl.load(fields + TEXT_SOURCE_VALUES, cache_modifier=".cg")
        fresh = capacity.to(tl.int32)
        key_count = tl.where(real, fresh, 0)
    else:
        capacity = tl.load(fields + TEXT_CAPACITY, cache_modifier=".cg")
        key_address = tl.load(fields + TEXT_KEYS, cache_modifier=".cg")
        value_address = tl.load(fields + TEXT_VALUES, cache_modifier=".cg")
        fresh = tl.load(fields + TEXT_FRESH, cache_modifier=".cg").to(tl.int32)
        reserved = tl.load(fields + TEXT_RESERVED, cache_modifier=".cg").to(tl.int32)
        position = tl.load(
            row_table + ROW_POSITION * MAX_ROWS + row, mask=real, other=0, cache_modifier=".cg"
        ).to(tl.int32)
        key_count = tl.where(real, position + reserved + 1, 0)
        if WINDOWED and not HAS_PREFIX:
            first_chunk = tl.maximum(position + 1 - window, 0) // CHUNK
            begin = tl.min(tl.where(real, first_chunk, chunks), 0)
    chunk_stop = tl.cdiv(key_count, CHUNK)
    stop = tl.max(chunk_stop, 0)
    if TREE:
        tree_start = tl.load(fields + TEXT_TREE_START, cache_modifier=".cg").to(tl.int32)
        shared_stop = tree_start // CHUNK
        begin = tl.where(of_one_row, shared_stop, begin)
        stop = tl.where(of_one_row, stop, tl.minimum(stop, shared_stop))
    chunk = begin + part
    if chunk >= stop:
        return
    needed = real & (chunk >= first_chunk) & (chunk < chunk_stop)
    # 3. the slots where the keys lie
    most_keys = tl.max(key_count, 0)
    column = tl.arange(0, HEAD_BLOCK)
    real_columns = column < HEAD_DIM
    key_number = chunk * CHUNK + tl.arange(0, CHUNK)
    slot = key_number
    if TREE:
        depth = key_number - tree_start
        below = (depth >= 0) & (key_number < most_keys)
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
    # 4. what no kernel of this forward writes
    old = (slot < fresh) & (key_number < most_keys)
    in_cache = old[:, None] & real_columns[None, :]
    key = tl.load(keys, mask=in_cache, other=0.0, cache_modifier=".cg")
    value = tl.load(values, mask=in_cache, other=0.0, cache_modifier=".cg")
    if CROSS:
        visible = real[:, None] & old[None, :]
    else:
        token = 0
        if HAS_PREFIX:
            token = tl.load(
                row_table + ROW_TOKEN * MAX_ROWS + row, mask=real, other=0, cache_modifier=".cg"
            )
        key_position = key_number - reserved
        distance = position[:, None] - key_position[None, :]
        visible = real[:, None] & is_seen(
            distance, key_position, token, known, window, HAS_PREFIX, WINDOWED
        )
        if BIASED:
            clipped = tl.minimum(tl.maximum(distance, 0), farthest)
            bias = tl.load(
                distance_bias + query_head[:, None] * (farthest + 1) + clipped,
                mask=visible,
                other=0.0,
            )
    # 5. queries, and the keys and values of this forward
    wait_for_previous(OVERLAP)
    at = (row * HEADS + query_head)[:, None] * HEAD_DIM + column[None, :]
    real_queries = real[:, None] & real_columns[None, :]
    query_rows = tl.load(queries + at, mask=real_queries, other=0.0, cache_modifier=".cg")
    if not CROSS:
        new = ((slot >= fresh) & (key_number < most_keys))[:, None] & real_columns[None, :]
        key = tl.where(new, tl.load(keys, mask=new, other=0.0, cache_modifier=".cg"), key)
        value = tl.where(new, tl.load(values, mask=new, other=0.0, cache_modifier=".cg"), value)
    # 6. softmax and the mixed values of this chunk
    scores = tl.dot(query_rows, tl.trans(key), input_precision="ieee") * scale
    if BIASED:
        scores += bias
    scores = tl.where(visible, scores, HIDDEN_SCORE)
    top = tl.max(scores, 1)
    weights = tl.where(visible, tl.exp2(scores - top[:, None]), 0.0)
    total = tl.where(needed, tl.sum(weights, 1), 1.0)
    mix = tl.dot(weights.to(element), value, input_precision="ieee")
    present = needed[:, None] & real_columns[None, :]
    chunk_count = tl.where(real, chunk_stop - first_chunk, 0)
    if tl.max(chunk_count, 0) == 1:
        tl.store(mixed + at, (mix / total[:, None]).to(element), mask=present)
        return
    # 7. the sum of all chunks of a query, by the last program that has one of them
    place = head * (MAX_ROWS * group) + query
    first_result = place * chunks
    results = partial + (first_result.to(tl.int64) * HEAD_BLOCK)[:, None] + column[None, :]
    tops = statistics + first_result * 2
    tl.store(results + chunk * HEAD_BLOCK, mix, mask=present)
    tl.store(tops + chunk * 2, top, mask=needed)
    tl.store(tops + chunk * 2 + 1, total, mask=needed)
    tl.debug_barrier()
    ended = tl.atomic_add(tickets + place, 1, mask=needed, sem="acq_rel")
    is_last = needed & (ended == chunk_count - 1)
    if tl.max(is_last.to(tl.int32), 0) == 1:
        tl.debug_barrier()  # each thread reads results after the tickets of all
        begin = tl.min(tl.where(is_last, first_chunk, chunks), 0)
        stop = tl.max(tl.where(is_last, chunk_stop, 0), 0)
        merged, whole = merge_chunks(
            results, tops, is_last, first_chunk, chunk_stop, begin, stop, real_columns
        )
        complete = is_last[:, None] & real_columns[None, :]
        tl.store(mixed + at, (merged / whole[:, None]).to(element), mask=complete)
        tl.store(tickets + place, 0, mask=is_last)


@triton.jit
def program_tile(program, tiles, chunks, tree_chunks, TREE: tl.constexpr, MAX_TILES: tl.constexpr):
    """The tile of queries of a program, its number among the tile's programs, and whether the tile
    is of one row of a tree. The grid is as in `attend`.
    """
    tile, part = program // chunks, program % chunks
    of_one_row = False
    if TREE:
        row_program = program - tiles * chunks
        of_one_row = row_program >= 0
        tile = tl.where(of_one_row, MAX_TILES + row_program // tree_chunks, tile)
        part = tl.where(of_one_row, row_program % tree_chunks, part)
    return tile, part, of_one_row


@triton.jit
def is_seen(
    distance,
    key_position,
    token,
    known,
    window,
    HAS_PREFIX: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Which keys, [queries, keys], a query sees among those before it.

    distance: the query's position minus the key's, [queries, keys]. key_position: [keys], negative
    in the reserved slots, the prefix, which only a query whose token is `known` or more sees. A
    window hides what is as far away as it is long, but for the prefix, which has no position.
    """
    seen = distance >= 0
    if HAS_PREFIX:
        seen = seen & ((token >= known)[:, None] | (key_position >= 0)[None, :])
    if WINDOWED:
        seen = seen & ((distance < window) | (key_position < 0)[None, :])
    return seen


@triton.jit
def merge_chunks(results, tops, is_last, first_chunk, chunk_stop, begin, stop, real_columns):
    """The mixed values of all chunks of each query, [queries, columns], and the sums of their
    weights, [queries], in float32. The sum is 1 where there is nothing to merge.

    results, tops: where each query's first chunk has its mixed values, and its largest score before
    the sum of its weights. is_last: the queries to merge; query q has the chunks from first_chunk[q]
    to chunk_stop[q], all between `begin` and `stop`. They are merged in order, so that the bits do
    not depend on which program ended last.
    """
    highest = tl.full(is_last.shape, HIDDEN_SCORE, tl.float32)
    for first in range(begin, stop, TOGETHER):
        for offset in tl.static_range(TOGETHER):
            ran = is_last & (first + offset >= first_chunk) & (first + offset < chunk_stop)
            at_top = tops + (first + offset) * 2
            top = tl.load(at_top, mask=ran, other=HIDDEN_SCORE, cache_modifier=".cg")
            highest = tl.maximum(highest, top)
    merged = tl.zeros((is_last.shape[0], real_columns.shape[0]), tl.float32)
    whole = tl.zeros(is_last.shape, tl.float32)
    for first in range(begin, stop, TOGETHER):
        for offset in tl.static_range(TOGETHER):
            ran = is_last & (first + offset >= first_chunk) & (first + offset < chunk_stop)
            at_top = tops + (first + offset) * 2
            top = tl.load(at_top, mask=ran, other=HIDDEN_SCORE, cache_modifier=".cg")
            total = tl.load(at_top + 1, mask=ran, other=0.0, cache_modifier=".cg")
            mix = tl.load(
                results + (first + offset) * real_columns.shape[0],
                mask=ran[:, None] & real_columns[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            weight = tl.exp2(top - highest)
            whole = tl.fma(weight, total, whole)
            merged = tl.fma(weight[:, None], mix, merged)
    return merged, tl.where(is_last, whole, 1.0)
