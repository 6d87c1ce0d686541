"""The Triton kernels' product with weights in blocks, in whole numbers.

Each 32 inputs of a row are rounded to 8 bits, as on a CPU (`../cpu/rounded.h`), and meet the 32
numbers of a group of weights in the matrix units: a sum of products of whole numbers is exact, and
takes no conversion of the weights. The two scales multiply the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gguf import GGMLQuantizationType as Type

from bild_lab.engine.models.native.gpu import block_matrix

GROUP, PAIR = tl.constexpr(block_matrix.GROUP), tl.constexpr(block_matrix.PAIR)
WORDS, BLOCK = tl.constexpr(block_matrix.WORDS), tl.constexpr(block_matrix.BLOCK)
Q4_0, Q4_K, Q6_K = (tl.constexpr(int(type)) for type in (Type.Q4_0, Type.Q4_K, Type.Q6_K))
ZERO_OF_Q4_K = tl.constexpr(block_matrix.ZEROS[Type.Q4_K])
TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 · 2 ** 23: after it, float32 has no places for fractions
LEAST_STATE = tl.constexpr(block_matrix.LEAST_STATE)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def holds_four_bits(type):
    """Whether two numbers of a matrix of this type share a byte."""
    return type in block_matrix.FOUR_BITS


@triton.constexpr_function
def holds_nested_scales(type):
    """Whether the scales of a matrix of this type have scales."""
    return type in block_matrix.NESTED


@triton.jit
def lower_numbers(packed):
    """16 times the signed numbers in the lower four bits of each byte."""
    if INTERPRETED:
        numbers = packed << 4
    else:  # four bytes at a time
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 moved; shl.b32 moved, $1, 4; and.b32 $0, moved, 0xf0f0f0f0; }",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return numbers


@triton.jit
def upper_numbers(packed):
    """16 times the signed numbers in the upper four bits of each byte."""
    if INTERPRETED:
        numbers = packed & -16
    else:
        numbers = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xf0f0f0f0;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    return numbers


@triton.jit
def byte_of(words, PLACE: tl.constexpr):
    """A signed byte of each word, 0 the lowest, in float32."""
    return (words << (24 - 8 * PLACE) >> 24).to(tl.float32)


@triton.jit
def half_of(words, PLACE: tl.constexpr):
    """The number of float16 in the lower, 0, or the upper half of each word, in float32."""
    return (words >> (16 * PLACE)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def rounded(states):
    """[ways, rows, GROUP] states as whole numbers from −127 to 127, and what one of each group
    stands for, [ways, rows]: NaN where a state is none.
    """
    states = states.to(tl.float32)
    largest = tl.max(tl.abs(states), 2)
    inverse = tl.where(largest > LEAST_STATE, 127.0 / tl.maximum(largest, LEAST_STATE), 0.0)
    # the lowest byte of such a number is the nearest whole one
    moved = states * inverse[:, :, None] + TO_WHOLE
    numbers = moved.to(tl.int32, bitcast=True).to(tl.int8)
    wrong = tl.sum(states * 0.0, 2)
    return numbers, largest * (1.0 / 127.0) + wrong


@triton.jit
def add_products(sums, weights, scales, states, steps):
    """Sums, [ways, outputs, rows], and the products of a group's numbers, times what one of each
    stands for.
    """
    whole = tl.dot(weights, tl.permute(states, (0, 2, 1)), out_dtype=tl.int32)
    return sums + whole.to(tl.float32) * (scales[:, :, None] * steps[:, None, :])


@triton.jit
def add_group(sums, weights, words, block_words, states, SECOND: tl.constexpr, TYPE: tl.constexpr):
    """Sums, and a group's products. weights: [ways, outputs, GROUP] whole numbers; of four bits, 16
    times these. words, block_words: [ways, outputs] scales of the pair. SECOND: group of it, 0 or 1.
    """
    numbers, steps = rounded(states)
    if TYPE == Q6_K:  # a scale for 16 inputs
        factor = half_of(block_words, 0)
        in_front = tl.arange(0, GROUP)[None, None, :] < GROUP // 2
        front = tl.where(in_front, numbers, 0)
        back = tl.where(in_front, 0, numbers)
        front_scales = byte_of(words, 2 * SECOND) * factor
        back_scales = byte_of(words, 2 * SECOND + 1) * factor
        sums = add_products(sums, weights, front_scales, front, steps)
        sums = add_products(sums, weights, back_scales, back, steps)
    elif TYPE == Q4_K:
        scales = byte_of(words, SECOND) * half_of(block_words, 0)
        minima = byte_of(words, 2 + SECOND) * half_of(block_words, 1)
        sums = add_products(sums, weights, scales, numbers, steps * (1.0 / 16))
        total = tl.sum(numbers.to(tl.int32), 2).to(tl.float32) * steps
        sums += (scales * ZERO_OF_Q4_K - minima)[:, :, None] * total[:, None, :]
    elif TYPE == Q4_0:
        sums = add_products(sums, weights, half_of(words, SECOND), numbers, steps * (1.0 / 16))
    else:
        sums = add_products(sums, weights, half_of(words, SECOND), numbers, steps)
    return sums


@triton.jit
def block_product(
    x,
    weights,
    scales,
    block_scales,
    rows,
    real_rows,
    lines,
    part,
    K,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    TYPE: tl.constexpr,
):
    """[ROWS, BLOCK_N]: as `product`, with weights, scales and type as in `BlockMatrix`.

    A step takes a pair of groups for each of the WAYS warps; of types with blocks, one block.
    """
    tl.static_assert(WAYS * PAIR == BLOCK or not holds_nested_scales(TYPE))
    pairs = K // PAIR
    line_words = tl.cdiv(pairs, WORDS) * WORDS
    steps = tl.cdiv(pairs, WAYS)
    group = tl.arange(0, GROUP)[None, None, :]
    activation_rows = x + rows[None, :, None] * K + group
    line = lines.to(tl.int64)[None, :]
    scale_lines = scales + line * line_words
    packed_group: tl.constexpr = GROUP if holds_four_bits(TYPE) else PAIR  # bytes of a pair
    weight_lines = weights + (line * (pairs * packed_group))[:, :, None] + group
    sums = tl.zeros((WAYS, BLOCK_N, ROWS), tl.float32)
    for step in tl.range(part * steps // SPLIT, (part + 1) * steps // SPLIT, num_stages=STAGES):
        pair = step * WAYS + tl.arange(0, WAYS)[:, None]
        real_pairs = pair < pairs
        at = weight_lines + (pair * packed_group)[:, :, None]
        states_at = activation_rows + (pair * PAIR)[:, :, None]
        present = real_rows[None, :, None]
        if EVEN:
            packed = tl.load(at)
            words = tl.load(scale_lines + pair)
        else:
            present = present & real_pairs[:, :, None]
            packed = tl.load(at, mask=real_pairs[:, :, None], other=0)
            words = tl.load(scale_lines + pair, mask=real_pairs, other=0)
        block_words = words
        if holds_nested_scales(TYPE):
            block_words = tl.load(block_scales + line * steps + step)
        if holds_four_bits(TYPE):
            first, second = lower_numbers(packed), upper_numbers(packed)
        else:
            first = packed
            if EVEN:
                second = tl.load(at + GROUP)
            else:
                second = tl.load(at + GROUP, mask=real_pairs[:, :, None], other=0)
        states = tl.load(states_at, mask=present, other=0.0, cache_modifier=".cg")
        sums = add_group(sums, first, words, block_words, states, 0, TYPE)
        states = tl.load(states_at + GROUP, mask=present, other=0.0, cache_modifier=".cg")
        sums = add_group(sums, second, words, block_words, states, 1, TYPE)
    return tl.trans(tl.sum(sums, 0))
