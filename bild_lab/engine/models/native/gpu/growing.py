"""Triton kernels that grow trees by a level: the children of the rows that have run, and the leaves
that grow next. The rule is `TreeSpec`'s; `methods/speculative/draft_tree.py` has it in Python.

Level 0 is the forward of the text's rows, of which the last has the first children. Level l runs the
leaves that were chosen among the children of level l − 1. Children are numbered within their level,
those of row r from r · CHILDREN on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bild_lab.engine.models.native.gpu.products import (
    ROW_POSITION,
    ROW_SLOT,
    ROW_TOKEN,
    TEXT_FIELDS,
    TEXT_FRESH,
    TEXT_RESERVED,
    TEXT_TREE_START,
    start_next,
    wait_for_previous,
)
from bild_lab.engine.models.native.gpu.rows import sum_beside

NO_LEAF = tl.constexpr(-1)  # of a row that does not run
NO_CHANCE = tl.constexpr(-1.0)  # of a child that does not belong to the tree


@triton.jit(do_not_specialize=["tiles", "level"])
def add_children(
    running,
    logits,
    tile_best,
    tile_sums,
    head_tokens,
    prune_confidences,
    leaves,
    tokens,
    chances,
    vocab,
    tiles,
    level,
    temperature,
    FIRST: tl.constexpr,
    SCALED: tl.constexpr,
    NARROW: tl.constexpr,
    WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The most likely tokens after a row of a level, of equal ones the first, with their chances.

    Grid: (texts, rows of a text), of level 0 one row a text. A row without a leaf has no children.
    The largest scores of `score`'s tiles say where a row's largest ones are: TILES groups of GROUP
    tiles, SPAN scores each, take turns.

    Probabilities are those of PyTorch's softmax, in float32; chances, their products, are float64.
    FIRST: level 0. SCALED: the temperature is not 1. head_tokens: as in `choose`.
    prune_confidences: of each text; a row whose largest probability at temperature 1 is not smaller
    has one child. leaves: [levels, texts, WIDTH], each row's number among the children of the level
    before. tokens, chances: [levels, texts, WIDTH, CHILDREN].
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    text = tl.program_id(0)
    row = tl.program_id(1)
    row_of_level = (level * tl.num_programs(0) + text) * WIDTH + row
    before = 1.0
    if not FIRST:
        if tl.load(running, cache_modifier=".cg") == 0:
            return
        leaf = tl.load(leaves + row_of_level, cache_modifier=".cg")
        if leaf < 0:
            return
        level_before = ((level - 1) * tl.num_programs(0) + text) * (WIDTH * CHILDREN)
        before = tl.load(chances + level_before + leaf, cache_modifier=".cg")
    # 1. the largest score, and the sum of exponentials beside it
    scored = text * tl.num_programs(1) + row
    scores = logits + scored.to(tl.int64) * vocab
    lane = tl.arange(0, TILES)
    best = tl.full((TILES,), float("-inf"), tl.float32)
    for offset in range(GROUP):
        tile = lane * GROUP + offset
        at = tile_best + scored * tiles + tile
        value = tl.load(at, mask=tile < tiles, other=float("-inf"), cache_modifier=".cg")
        best = tl.maximum(best, value)
    highest = tl.max(best, 0)
    total = sum_beside(tile_best, tile_sums, scored * tiles, highest, tiles, TILES)
    confidence = 1.0 / total
    if SCALED:
        top = highest / temperature
        sums = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab, BLOCK):
            output = first + tl.arange(0, BLOCK)
            value = tl.load(
                scores + output, mask=output < vocab, other=float("-inf"), cache_modifier=".cg"
            )
            sums += tl.exp(value / temperature - top)
        total = tl.sum(sums, 0)
    # 2. one child after the other
    is_sure = confidence.to(tl.float64) >= tl.load(prune_confidences + text, cache_modifier=".cg")
    previous_score = highest
    previous_output = tl.full((), -1, tl.int32)
    for child in range(CHILDREN):
        group = tl.min(tl.where(best == tl.max(best, 0), lane, TILES), 0)
        output = group * SPAN + tl.arange(0, SPAN)
        value = tl.load(
            scores + output, mask=output < vocab, other=float("-inf"), cache_modifier=".cg"
        )
        # those that are no child yet
        is_left = (value < previous_score) | (
            (value == previous_score) & (output > previous_output)
        )
        left = tl.where(is_left, value, float("-inf"))
        previous_score = tl.max(left, 0)
        previous_output = tl.min(tl.where(left == previous_score, output, vocab), 0)
        rest = tl.max(tl.where(output == previous_output, float("-inf"), left), 0)
        best = tl.where(lane == group, rest, best)
        # its token and its chance
        token = previous_output.to(tl.int64)
        if NARROW:
            token = tl.load(head_tokens + token, mask=previous_output < vocab, other=0)
        exponent = previous_score - highest
        if SCALED:
            exponent = previous_score / temperature - top
        probability = tl.exp(exponent.to(tl.float64)) / total.to(tl.float64)
        probability = probability.to(tl.float32)
        is_child = (probability > 0.0) & ((child == 0) | (is_sure == 0))
        chance = before * probability.to(tl.float64)
        at = row_of_level * CHILDREN + child
        tl.store(tokens + at, token)
        tl.store(chances + at, tl.where(is_child, chance, NO_CHANCE))


@triton.jit(do_not_specialize=["level"])
def next_level(
    running,
    depths,
    min_probs,
    end_tokens,
    leaves,
    tokens,
    chances,
    row_table,
    text_table,
    paths,
    level_paths,
    level,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    ROWS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    END_TOKENS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Choose the leaves of each text's tree that grow next, and lay out their rows.

    Grid: (texts). The leaves are the WIDTH most likely children of the level that has run, of
    equally likely ones the first, in the order grown. Rows of a text without a leaf are padding,
    without a slot, and before every position, so that attention has nothing to do. `running` counts
    the trees that grow on; since the programs of this launch write it, none of them reads it. A tree
    that has ended is one whose last level had no leaves, and has none in the next level either.

    depths, min_probs: of each text, as in `TreeSpec`. end_tokens: as in `choose`. leaves, tokens,
    chances: as in `add_children`. paths: as in `attend`. level_paths: [2, MAX_ROWS, MAX_DEPTH], the
    paths of even levels' rows and those of odd levels', as a row's parent may lie anywhere among the
    rows before. ROWS, CANDIDATES: powers of two with room for WIDTH, and for the children of WIDTH
    rows.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    text = tl.program_id(0)
    first_row = text * WIDTH
    row = tl.arange(0, ROWS)
    fields = text_table + text * TEXT_FIELDS
    tree_start = tl.load(fields + TEXT_TREE_START, cache_modifier=".cg")
    reserved = tl.load(fields + TEXT_RESERVED, cache_modifier=".cg")
    # 1. how many rows this level ran, and how many rows of the tree have run
    level_leaves = leaves + (level * tl.num_programs(0) + text) * WIDTH
    next_leaves = level_leaves + tl.num_programs(0) * WIDTH
    if FIRST:
        level_rows = 1
        tree_rows = 0
    else:
        leaf = tl.load(level_leaves + row, mask=row < WIDTH, other=NO_LEAF, cache_modifier=".cg")
        level_rows = tl.sum((leaf >= 0).to(tl.int32), 0)
        if level_rows == 0:
            tl.store(next_leaves + row, NO_LEAF, mask=row < WIDTH)
            return
        tree_rows = tl.load(fields + TEXT_FRESH, cache_modifier=".cg") - tree_start + level_rows
    # 2. its children, and the leaves among them
    child = tl.arange(0, CANDIDATES)
    at = (level * tl.num_programs(0) + text) * (WIDTH * CHILDREN) + child
    ran = child < level_rows * CHILDREN
    token = tl.load(tokens + at, mask=ran, other=0, cache_modifier=".cg")
    chance = tl.load(chances + at, mask=ran, other=NO_CHANCE, cache_modifier=".cg")
    grows = (chance >= 0.0) & (chance >= tl.load(min_probs + text, cache_modifier=".cg"))
    for place in tl.static_range(END_TOKENS):
        end = tl.load(end_tokens + text * END_TOKENS + place, cache_modifier=".cg")
        grows = grows & (token != end)
    is_leaf = most_likely(tl.where(grows, chance, NO_CHANCE), child, WIDTH)
    is_last_level = level + 1 >= tl.load(depths + text, cache_modifier=".cg")
    is_leaf = is_leaf & (child < tl.where(is_last_level, 0, CANDIDATES))
    leaf_count = tl.sum(is_leaf.to(tl.int32), 0)
    place = tl.cumsum(is_leaf.to(tl.int32), 0) - 1
    # 3. their rows; all that is read of these tables has been read
    tl.debug_barrier()
    is_padding = (row >= leaf_count) & (row < WIDTH)
    padding = row_table + first_row + row
    tl.store(next_leaves + row, NO_LEAF, mask=is_padding)
    tl.store(padding + ROW_SLOT * MAX_ROWS, -1, mask=is_padding)
    tl.store(padding + ROW_POSITION * MAX_ROWS, -1 - reserved, mask=is_padding)
    row_at = row_table + first_row + place
    in_tree = tree_rows + place
    tl.store(next_leaves + place, child.to(tl.int64), mask=is_leaf)
    tl.store(row_at + ROW_TOKEN * MAX_ROWS, token, mask=is_leaf)
    tl.store(row_at + ROW_SLOT * MAX_ROWS, tree_start + in_tree, mask=is_leaf)
    tl.store(row_at + ROW_POSITION * MAX_ROWS, tree_start - reserved + level, mask=is_leaf)
    # 4. their paths: those of their parents, and themselves
    path = paths + (first_row + place) * MAX_DEPTH
    parent_row = level % 2 * MAX_ROWS + first_row + child // CHILDREN
    parent_path = level_paths + parent_row * MAX_DEPTH
    next_path = level_paths + ((level + 1) % 2 * MAX_ROWS + first_row + place) * MAX_DEPTH
    for depth in range(0, level):
        ancestor = tl.load(parent_path + depth, mask=is_leaf, cache_modifier=".cg")
        tl.store(path + depth, ancestor, mask=is_leaf)
        tl.store(next_path + depth, ancestor, mask=is_leaf)
    tl.store(path + level, in_tree, mask=is_leaf)
    tl.store(next_path + level, in_tree, mask=is_leaf)
    # 5. the text
    tl.store(fields + TEXT_FRESH, tree_start + tree_rows)
    if leaf_count == 0:
        tl.atomic_add(running, -1, sem="acq_rel")


@triton.jit
def most_likely(chance, child, WIDTH: tl.constexpr):
    """Which children are the WIDTH most likely, of equally likely ones the first, and have a chance.

    chance: [children], NO_CHANCE of one that does not grow. child: their numbers.
    """
    left = chance
    is_chosen = child < 0
    for _ in range(WIDTH):
        is_best = (left == tl.max(left, 0)) & (left >= 0.0)
        best = tl.min(tl.where(is_best, child, child.shape[0]), 0)
        is_chosen = is_chosen | (child == best)
        left = tl.where(child == best, NO_CHANCE, left)
    return is_chosen
