"""Triton kernels of a layer's matrix products, each with what comes before and after it.

Every product takes `m` rows in tiles of a fixed number of rows, and adds along its inputs in an
order that the tiling alone decides. So a row has the same bits whatever runs beside it.

The root-mean-square norm is split. A row's factor is one number, which scales a product's result:
whoever writes the residual stream leaves `scaled`, the stream times the next norm's weights, and
`squares`, the sums of squares of each 16 columns; whoever reads it multiplies by the factor.

On a GPU of compute capability 9 a kernel begins while the one before it still runs (programmatic
dependent launch). `begin_stream`, which begins a forward, waits for all before it and only then lets
the next kernel begin. So what no kernel of the same forward writes may be read before
`wait_for_previous`, and all else only after it. A kernel that has nothing to do waits all the same:
when it ends, all before it have ended. `running` is read before the wait, too: no kernel of the same
forward writes it but the one of `exits.py`, after which the next begins in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bild_lab.engine.models.native.gpu.blocks import block_product, holds_four_bits

# columns of `row_table`, [4, MAX_ROWS], and fields of a text in `text_table`, as `inputs.py` fills them
ROW_TOKEN, ROW_SLOT, ROW_POSITION, ROW_TEXT = (tl.constexpr(index) for index in range(4))
(
    TEXT_FRESH,
    TEXT_TREE_START,
    TEXT_CAPACITY,
    TEXT_KEYS,
    TEXT_VALUES,
    TEXT_SOURCE,
    TEXT_SOURCE_KEYS,
    TEXT_SOURCE_VALUES,
    TEXT_RESERVED,
    TEXT_FIELDS,
) = (tl.constexpr(index) for index in range(10))
CACHE_LINE = tl.constexpr(128)  # bytes
SQUARES_COLUMNS = tl.constexpr(16)  # of the residual stream, whose squares are summed together
RELU, SILU, GELU_TANH, GELU = (tl.constexpr(index) for index in range(4))  # as in `stack.py`


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next kernel begin."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait for the kernel before: what it wrote is visible from here on."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def program_place(m, ROWS: tl.constexpr):
    """The tile of outputs, the part of the inputs, and the rows of this program.

    The grid is (tiles of rows, tiles of outputs, parts of the inputs): programs that read the same
    weights are neighbours.
    """
    tile, part = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return tile, part, rows, rows < m


@triton.jit
def ask_ahead(pointers):
    """Ask for these lines of memory in the second cache."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def early_weights(
    weights,
    lines,
    part,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    RESIDENT: tl.constexpr,
    TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What of a program's weights is asked for while the kernel before still runs.

    RESIDENT: all of them, [ways, outputs, block], which stay on the chip. Else their first 16 KB,
    into the second cache. TYPE: as in `product`.
    """
    loaded = 0
    line_numbers = K // 2 if holds_four_bits(TYPE) else K
    line_at = weights + lines.to(tl.int64) * line_numbers
    if RESIDENT:
        ways = tl.arange(0, WAYS)[:, None] * BLOCK_K
        inputs = part * (BLOCK_K * WAYS) + ways + tl.arange(0, BLOCK_K)[None, :]
        at = line_at[None, :, None] + inputs[:, None, :]
        if EVEN:
            loaded = tl.load(at)
        else:
            loaded = tl.load(at, mask=(inputs < K)[:, None, :], other=0.0)
    elif OVERLAP:
        pieces: tl.constexpr = 128 // BLOCK_N if BLOCK_N < 128 else 1
        apart: tl.constexpr = CACHE_LINE if TYPE else CACHE_LINE // 2
        first = part * line_numbers // SPLIT + tl.arange(0, pieces) * apart
        ask_ahead(line_at[:, None] + tl.minimum(first, line_numbers - 1)[None, :])
    return loaded


@triton.jit
def product(
    x,
    weights,
    scales,
    block_scales,
    loaded,
    rows,
    real_rows,
    lines,
    part,
    K,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    RESIDENT: tl.constexpr,
    TYPE: tl.constexpr,
):
    """[ROWS, BLOCK_N]: rows of x, [·, K], times these lines of the weights, over this program's
    part of K.

    WAYS: each warp sums its own part of K, and the parts are added at the end; 1: all warps share
    one sum (on compute capability 9 a warp group's product). The weights stand on the matrix units'
    wide side, as rows are few. RESIDENT: `loaded` has them; else they stream through STAGES buffers.
    TYPE: of weights in blocks (`blocks.py`), 0 for plain numbers.
    """
    step: tl.constexpr = BLOCK_K * WAYS
    blocks = tl.cdiv(K, step)
    first_block = part * blocks // SPLIT
    last_block = (part + 1) * blocks // SPLIT
    if TYPE:
        total = block_product(
            x, weights, scales, block_scales, rows, real_rows, lines, part, K,
            ROWS, BLOCK_N, WAYS, STAGES, EVEN, SPLIT, TYPE,
        )  # fmt: skip
    elif RESIDENT:
        ways = tl.arange(0, WAYS)[:, None] * BLOCK_K
        inputs = part * step + ways + tl.arange(0, BLOCK_K)[None, :]
        at = x + rows[None, :, None] * K + inputs[:, None, :]
        present = real_rows[None, :, None]
        if not EVEN:
            present = present & (inputs < K)[:, None, :]
        activations = tl.load(at, mask=present, other=0.0, cache_modifier=".cg")
        sums = tl.dot(loaded, tl.permute(activations, (0, 2, 1)), input_precision="ieee")
        total = tl.trans(tl.sum(sums, 0))
    elif WAYS == 1:
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        weight_lines = weights + lines.to(tl.int64)[:, None] * K
        activation_rows = x + rows[:, None] * K
        for block in tl.range(first_block, last_block, num_stages=STAGES):
            inputs = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            present = real_rows[:, None]
            if EVEN:
                tile = tl.load(weight_lines + inputs)
            else:
                tile = tl.load(weight_lines + inputs, mask=inputs < K, other=0.0)
                present = present & (inputs < K)
            activations = tl.load(
                activation_rows + inputs, mask=present, other=0.0, cache_modifier=".cg"
            )
            sums = tl.dot(tile, tl.trans(activations), sums, input_precision="ieee")
        total = tl.trans(sums)
    else:
        sums = tl.zeros((WAYS, BLOCK_N, ROWS), tl.float32)
        weight_lines = weights + lines.to(tl.int64)[None, :, None] * K
        activation_rows = x + rows[None, :, None] * K
        ways = tl.arange(0, WAYS)[:, None] * BLOCK_K
        for block in tl.range(first_block, last_block, num_stages=STAGES):
            inputs = (block * step + ways + tl.arange(0, BLOCK_K)[None, :])[:, None, :]
            present = real_rows[None, :, None]
            if EVEN:
                tile = tl.load(weight_lines + inputs)
            else:
                tile = tl.load(weight_lines + inputs, mask=inputs < K, other=0.0)
                present = present & (inputs < K)
            activations = tl.load(
                activation_rows + inputs, mask=present, other=0.0, cache_modifier=".cg"
            )
            sums = tl.dot(tile, tl.permute(activations, (0, 2, 1)), sums, input_precision="ieee")
        total = tl.trans(tl.sum(sums, 0))
    return total


@triton.jit
def merge_parts(
    partial,
    scratch,
    tickets,
    tile,
    part,
    real_rows,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sum of all parts of K, in order, in the program that ends last; and whether this is it.

    Nobody waits for anybody: each program leaves its part and takes a ticket.
    """
    place = tl.program_id(0) * tl.num_programs(1) + tile
    at = tl.arange(0, ROWS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    at = scratch + place * (SPLIT * ROWS * BLOCK_N) + at
    present = real_rows[:, None] & (tl.arange(0, BLOCK_N) >= 0)[None, :]
    tl.store(at + part * (ROWS * BLOCK_N), partial, mask=present)
    tl.debug_barrier()
    is_last = tl.atomic_add(tickets + place, 1, sem="acq_rel") == SPLIT - 1
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if is_last:
        for index in tl.static_range(SPLIT):
            total += tl.load(
                at + index * (ROWS * BLOCK_N), mask=present, other=0.0, cache_modifier=".cg"
            )
        tl.store(tickets + place, 0)
    return total, is_last


@triton.jit
def load_squares(squares, rows, real_rows, dim, GROUPS: tl.constexpr):
    """The sums of squares of each row, [ROWS, GROUPS]."""
    group = tl.arange(0, GROUPS)
    present = real_rows[:, None] & (group < dim // SQUARES_COLUMNS)[None, :]
    at = squares + rows[:, None] * GROUPS + group[None, :]
    return tl.load(at, mask=present, other=0.0, cache_modifier=".cg")


@triton.jit
def rms_factors(sums, dim, epsilon, RANGE: tl.constexpr):
    """One over the root of the mean square of each row, from its sums of squares.

    RANGE: what `scaled` was divided by, so that it stays in the range of float16.
    """
    return tl.rsqrt(tl.sum(sums, 1) / dim + epsilon) * RANGE


@triton.jit
def store_stream(
    values,
    norm_weights,
    x,
    scaled,
    squares,
    rows,
    real_rows,
    tile,
    dim,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr,
):
    """Write columns of the residual stream, and what the reader of the next norm needs of them.

    norm_weights: the next norm's, of these columns, in float32.
    """
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    present = real_rows[:, None] & (columns < dim)[None, :]
    at = rows[:, None] * dim + columns[None, :]
    values = tl.where(present, values, 0.0)
    tl.store(x + at, values, mask=present)
    scaled_values = values * (norm_weights / RANGE)[None, :]
    tl.store(scaled + at, scaled_values.to(scaled.dtype.element_ty), mask=present)
    store_squares(values, squares, rows, real_rows, tile, dim, GROUPS, BLOCK_N)


@triton.jit
def store_squares(
    values,
    squares,
    rows,
    real_rows,
    tile,
    dim,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the sums of squares of each 16 of these columns.

    Pairs of neighbours are added, then pairs of pairs, in whatever kernel: a forward that begins in
    the middle has the bits of one that does not.
    """
    ROWS: tl.constexpr = values.shape[0]
    count: tl.constexpr = BLOCK_N // SQUARES_COLUMNS
    rounded = tl.fma(values, values, 0.0 * values)  # so that no sum takes a product in
    left_of_2, right_of_2 = tl.split(tl.reshape(rounded, (ROWS, count, 2, 2, 2, 2)))
    left_of_4, right_of_4 = tl.split(left_of_2 + right_of_2)
    left_of_8, right_of_8 = tl.split(left_of_4 + right_of_4)
    left_of_16, right_of_16 = tl.split(left_of_8 + right_of_8)
    group = tile * count + tl.arange(0, count)
    present = real_rows[:, None] & (group < dim // SQUARES_COLUMNS)[None, :]
    at = squares + rows[:, None] * GROUPS + group[None, :]
    tl.store(at, left_of_16 + right_of_16, mask=present)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The activation function. GELU_TANH is written as gate · sigmoid(2 √(2/π) (…))."""
    if ACTIVATION == RELU:
        value = tl.maximum(gate, 0.0)
    elif ACTIVATION == SILU:
        value = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == GELU_TANH:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = gate / (1.0 + tl.exp(-inner))
    else:
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return value


@triton.jit(do_not_specialize=["m", "first_tile", "first_line", "layer", "kind", "positions_count"])
def project(
    running,
    scaled,
    squares,
    weights,
    scales,
    block_scales,
    bias,
    head_norm,
    cos,
    sin,
    row_table,
    text_table,
    queries,
    scratch,
    tickets,
    m,
    K,
    first_tile,
    first_line,
    layer,
    kind,
    positions_count,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUPS: tl.constexpr,
    RANGE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    RESIDENT: tl.constexpr,
    TYPE: tl.constexpr,
    FILLS: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Queries, keys and values of each row: keys and values go to their slots of the text's cache.

    Grid: (tiles of rows, tiles of outputs, parts of K). Outputs 2 p and 2 p + 1 of a tile are pair
    p: the two numbers of a head that a rotation turns, HEAD_DIM / 2 lines of the weights apart.
    first_line: the output that the weights begin with. KV_HEADS 0: queries alone (cross-attention).
    HAS_HEAD_NORM: a tile is one head. FILLS: keys and values are computed whether anything is
    running or not.
    """
    start_next(OVERLAP)
    tile, part, rows, real_rows = program_place(m, ROWS)
    if STOPPABLE:
        leaves = tl.load(running, cache_modifier=".cg") == 0
        if FILLS:
            leaves = leaves & (first_tile + tile < HEADS * HEAD_DIM // BLOCK_N)
        if leaves:
            wait_for_previous(OVERLAP)
            return
    half: tl.constexpr = HEAD_DIM // 2
    pairs: tl.constexpr = BLOCK_N // 2
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    # 1. the weights' lines of this tile, and what no kernel of this forward writes
    pair = (first_tile + tile) * pairs + tl.arange(0, pairs)
    head = pair // half
    place = pair % half
    first_of_pair = head * HEAD_DIM + place
    real_pairs = head < all_heads
    output = tl.arange(0, BLOCK_N)
    line_pair = (first_tile + tile) * pairs + output // 2
    lines = line_pair // half * HEAD_DIM + line_pair % half + (output % 2) * half
    lines = tl.minimum(lines, all_heads * HEAD_DIM - 1) - first_line
    loaded = early_weights(
        weights, lines, part, K, BLOCK_N, BLOCK_K, WAYS, EVEN, SPLIT, RESIDENT, TYPE, OVERLAP
    )
    slot = tl.load(
        row_table + ROW_SLOT * MAX_ROWS + rows, mask=real_rows, other=-1, cache_modifier=".cg"
    )
    stored = real_rows & (slot >= 0)
    if KV_HEADS > 0:
        text = tl.load(
            row_table + ROW_TEXT * MAX_ROWS + rows, mask=real_rows, other=0, cache_modifier=".cg"
        )
        fields = text_table + text * TEXT_FIELDS
        capacity = tl.load(fields + TEXT_CAPACITY, mask=real_rows, other=0, cache_modifier=".cg")
        keys = tl.load(fields + TEXT_KEYS, mask=stored, other=0, cache_modifier=".cg")
        values = tl.load(fields + TEXT_VALUES, mask=stored, other=0, cache_modifier=".cg")
    if ROTARY:
        position = tl.load(
            row_table + ROW_POSITION * MAX_ROWS + rows,
            mask=real_rows,
            other=0,
            cache_modifier=".cg",
        )
        angle = (kind * positions_count + position)[:, None] * HEAD_DIM + place[None, :]
        turned = stored[:, None] & (head < HEADS + KV_HEADS)[None, :]
        cosine = tl.load(cos + angle, mask=turned, other=1.0)
        sine = tl.load(sin + angle + half, mask=turned, other=0.0)
    if HAS_BIAS:
        first_bias = tl.load(bias + first_of_pair, mask=real_pairs, other=0.0).to(tl.float32)
        second_bias = tl.load(bias + first_of_pair + half, mask=real_pairs, other=0.0).to(
            tl.float32
        )
    if HAS_HEAD_NORM:
        norms = head_norm + first_of_pair
        first_norm = tl.load(norms, mask=head < HEADS + KV_HEADS, other=1.0).to(tl.float32)
        second_norm = tl.load(norms + half, mask=head < HEADS + KV_HEADS, other=1.0).to(tl.float32)
    # 2. the product
    wait_for_previous(OVERLAP)
    sums_of_squares = load_squares(squares, rows, real_rows, K, GROUPS)
    sums = product(
        scaled, weights, scales, block_scales, loaded, rows, real_rows, lines, part, K,
        ROWS, BLOCK_N, BLOCK_K, WAYS, STAGES, EVEN, SPLIT, RESIDENT, TYPE,
    )  # fmt: skip
    is_last = True
    if SPLIT > 1:
        sums, is_last = merge_parts(
            sums, scratch, tickets, tile, part, real_rows, SPLIT, ROWS, BLOCK_N
        )
    # 3. bias, norm of the head, rotation
    if is_last:
        factors = rms_factors(sums_of_squares, K, epsilon, RANGE)
        first, second = tl.split(tl.reshape(sums * factors[:, None], (ROWS, pairs, 2)))
        if HAS_BIAS:
            first += first_bias[None, :]
            second += second_bias[None, :]
        if HAS_HEAD_NORM:
            normed = (head < HEADS + KV_HEADS)[None, :]
            mean = tl.sum(first * first + second * second, 1) / HEAD_DIM
            factor = tl.rsqrt(mean + epsilon)[:, None]
            first = tl.where(normed, first * factor * first_norm[None, :], first)
            second = tl.where(normed, second * factor * second_norm[None, :], second)
        if ROTARY:
            first, second = first * cosine - second * sine, second * cosine + first * sine
        # 4. to where they are read
        element: tl.constexpr = queries.dtype.element_ty
        query_at = queries + rows[:, None] * (HEADS * HEAD_DIM) + first_of_pair[None, :]
        is_query = real_rows[:, None] & (head < HEADS)[None, :]
        tl.store(query_at, first.to(element), mask=is_query)
        tl.store(query_at + half, second.to(element), mask=is_query)
        if KV_HEADS > 0:
            key_head = head - HEADS
            value_head = key_head - KV_HEADS
            is_key = stored[:, None] & ((key_head >= 0) & (key_head < KV_HEADS))[None, :]
            is_value = stored[:, None] & (value_head >= 0)[None, :] & real_pairs[None, :]
            line = (layer * KV_HEADS + key_head)[None, :] * capacity[:, None] + slot[:, None]
            key_at = keys.to(tl.pointer_type(element))[:, None] + line * HEAD_DIM + place[None, :]
            tl.store(key_at, first.to(element), mask=is_key)
            tl.store(key_at + half, second.to(element), mask=is_key)
            line = (layer * KV_HEADS + value_head)[None, :] * capacity[:, None] + slot[:, None]
            value_at = values.to(tl.pointer_type(element))[:, None] + line * HEAD_DIM
            tl.store(value_at + place[None, :], first.to(element), mask=is_value)
            tl.store(value_at + place[None, :] + half, second.to(element), mask=is_value)


@triton.jit(do_not_specialize=["m"])
def residual(
    running,
    inputs,
    weights,
    scales,
    block_scales,
    bias,
    next_norm,
    x,
    scaled,
    squares,
    block,
    block_squares,
    scratch,
    tickets,
    m,
    K,
    dim,
    HAS_BIAS: tl.constexpr,
    NORMED: tl.constexpr,
    GROUPS: tl.constexpr,
    RANGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    RESIDENT: tl.constexpr,
    TYPE: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add a block's last product to the residual stream.

    Grid: as `project`. NORMED: the block's result is normed before it is added, which needs the
    whole row: it goes to `block`, and `add_normed` adds it.
    """
    start_next(OVERLAP)
    if STOPPABLE:
        if tl.load(running, cache_modifier=".cg") == 0:
            wait_for_previous(OVERLAP)
            return
    tile, part, rows, real_rows = program_place(m, ROWS)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = tl.minimum(columns, dim - 1)
    loaded = early_weights(
        weights, lines, part, K, BLOCK_N, BLOCK_K, WAYS, EVEN, SPLIT, RESIDENT, TYPE, OVERLAP
    )
    norm_weights = tl.load(next_norm + lines).to(tl.float32)
    if HAS_BIAS:
        offsets = tl.load(bias + lines).to(tl.float32)
    wait_for_previous(OVERLAP)
    present = real_rows[:, None] & (columns < dim)[None, :]
    at = rows[:, None] * dim + columns[None, :]
    before = tl.load(x + at, mask=present, other=0.0, cache_modifier=".cg")
    sums = product(
        inputs, weights, scales, block_scales, loaded, rows, real_rows, lines, part, K,
        ROWS, BLOCK_N, BLOCK_K, WAYS, STAGES, EVEN, SPLIT, RESIDENT, TYPE,
    )  # fmt: skip
    is_last = True
    if SPLIT > 1:
        sums, is_last = merge_parts(
            sums, scratch, tickets, tile, part, real_rows, SPLIT, ROWS, BLOCK_N
        )
    if is_last:
        if HAS_BIAS:
            sums += offsets[None, :]
        if NORMED:
            sums = tl.where(present, sums, 0.0)
            tl.store(block + at, sums, mask=present)
            store_squares(sums, block_squares, rows, real_rows, tile, dim, GROUPS, BLOCK_N)
        else:
            store_stream(
                before + sums, norm_weights, x, scaled, squares, rows, real_rows, tile, dim,
                GROUPS, BLOCK_N, RANGE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def feed_forward(
    running,
    scaled,
    squares,
    weights,
    scales,
    block_scales,
    bias,
    inner,
    scratch,
    tickets,
    m,
    K,
    hidden,
    epsilon,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    RANGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    RESIDENT: tl.constexpr,
    TYPE: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The inner activations of a feed-forward block.

    Grid: as `project`. GATED: outputs 2 p and 2 p + 1 of a tile are the gate and the value of
    column p, which lie `hidden` lines of the weights apart.
    """
    start_next(OVERLAP)
    if STOPPABLE:
        if tl.load(running, cache_modifier=".cg") == 0:
            wait_for_previous(OVERLAP)
            return
    tile, part, rows, real_rows = program_place(m, ROWS)
    output = tl.arange(0, BLOCK_N)
    width: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    columns = tile * width + tl.arange(0, width)
    if GATED:
        lines = tl.minimum(tile * width + output // 2, hidden - 1) + (output % 2) * hidden
    else:
        lines = tl.minimum(tile * width + output, hidden - 1)
    loaded = early_weights(
        weights, lines, part, K, BLOCK_N, BLOCK_K, WAYS, EVEN, SPLIT, RESIDENT, TYPE, OVERLAP
    )
    if HAS_BIAS:
        offsets = tl.load(bias + lines).to(tl.float32)
    wait_for_previous(OVERLAP)
    sums_of_squares = load_squares(squares, rows, real_rows, K, GROUPS)
    sums = product(
        scaled, weights, scales, block_scales, loaded, rows, real_rows, lines, part, K,
        ROWS, BLOCK_N, BLOCK_K, WAYS, STAGES, EVEN, SPLIT, RESIDENT, TYPE,
    )  # fmt: skip
    is_last = True
    if SPLIT > 1:
        sums, is_last = merge_parts(
            sums, scratch, tickets, tile, part, real_rows, SPLIT, ROWS, BLOCK_N
        )
    if is_last:
        values = sums * rms_factors(sums_of_squares, K, epsilon, RANGE)[:, None]
        if HAS_BIAS:
            values += offsets[None, :]
        if GATED:
            gate, value = tl.split(tl.reshape(values, (ROWS, width, 2)))
            values = activated(gate, ACTIVATION) * value
        else:
            values = activated(values, ACTIVATION)
        present = real_rows[:, None] & (columns < hidden)[None, :]
        at = inner + rows[:, None] * hidden + columns[None, :]
        tl.store(at, values.to(inner.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["m"])
def score(
    running,
    scaled,
    squares,
    weights,
    scales,
    block_scales,
    bias,
    scored_rows,
    logits,
    tile_best,
    tile_tokens,
    tile_sums,
    m,
    K,
    vocab,
    scale,
    epsilon,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    RANGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    RESIDENT: tl.constexpr,
    TYPE: tl.constexpr,
    STOPPABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The head's scores of `m` scored rows; of each tile the largest, its token, and the sum of
    exponentials beside it.

    Grid: as `project`, with one part. scored_rows: which row of the forward each is.
    """
    start_next(OVERLAP)
    if STOPPABLE:
        if tl.load(running, cache_modifier=".cg") == 0:
            wait_for_previous(OVERLAP)
            return
    tile, part, outputs, real_rows = program_place(m, ROWS)
    tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = tl.minimum(tokens, vocab - 1)
    loaded = early_weights(
        weights, lines, part, K, BLOCK_N, BLOCK_K, WAYS, EVEN, SPLIT, RESIDENT, TYPE, OVERLAP
    )
    rows = tl.load(scored_rows + outputs, mask=real_rows, other=0, cache_modifier=".cg")
    if HAS_BIAS:
        offsets = tl.load(bias + lines).to(tl.float32)
    wait_for_previous(OVERLAP)
    sums_of_squares = load_squares(squares, rows, real_rows, K, GROUPS)
    scores = product(
        scaled, weights, scales, block_scales, loaded, rows, real_rows, lines, part, K,
        ROWS, BLOCK_N, BLOCK_K, WAYS, STAGES, EVEN, SPLIT, RESIDENT, TYPE,
    )  # fmt: skip
    factors = rms_factors(sums_of_squares, K, epsilon, RANGE)
    scores = scores * (factors * scale)[:, None]
    if HAS_BIAS:
        scores += offsets[None, :]
    scores = tl.where((tokens < vocab)[None, :], scores, float("-inf"))
    present = real_rows[:, None] & (tokens < vocab)[None, :]
    at = logits + outputs[:, None].to(tl.int64) * vocab + tokens[None, :]
    tl.store(at, scores, mask=present)
    best = tl.max(scores, 1)
    # a tile without a token, as a bias of −inf leaves it, adds nothing
    beside = tl.where(scores == float("-inf"), 0.0, tl.exp(scores - best[:, None]))
    at = outputs * tl.num_programs(1) + tile
    tl.store(tile_best + at, best, mask=real_rows)
    tl.store(tile_tokens + at, tile * BLOCK_N + tl.argmax(scores, 1).to(tl.int32), mask=real_rows)
    tl.store(tile_sums + at, tl.sum(beside, 1), mask=real_rows)
