"""Weight matrices in the order in which the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import Q4_K
from jaxtyping import Float, Int32, Num, UInt8
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.models.checkpoint.gguf_file import PackedTensor
from bild_lab.engine.models.native.cpu.structures import Matrix
from bild_lab.engine.models.native.stack import Weight
from bild_lab.errors import UserError

LANES, PANEL = 16, 32  # columns of a vector, and of a panel of weights
BLOCK = 32  # inputs that share a scale, where weights are quantized
# what is added to a signed number of so many bits, so that all count from 0
OFFSETS = {8: 128, 4: 8}
CHUNK = 256 * PANEL  # rows that are quantized at a time, so that few are in float32
PLAIN = 0  # the type of a matrix whose numbers are not in blocks


class PackedMatrix(NamedTuple):
    """A linear layer for the kernels.

    matrix: the structure that the kernels read. It holds addresses alone: whoever keeps it must
        keep the two other fields as long.
    panels: the packed weights.
    references: what else the structure points to.
    """

    matrix: Matrix
    panels: list[Tensor]
    references: list[object]


def packed_matrix(weight: Weight, bits: int | None = None) -> PackedMatrix:
    """Pack a linear layer for the kernels.

    bits: 8 or 4 to quantize it, if it has a multiple of 32 inputs; None: in its own precision.
    Tensors of a GGUF file keep their scales and numbers. Raises UserError where outputs of one
    panel have different types.
    """
    parts = weight.matrix if isinstance(weight.matrix, tuple) else (weight.matrix,)
    outputs = sum(matrix.shape[0] for matrix in parts)
    inputs = parts[0].shape[1]
    bias = None
    if weight.bias is not None:
        bias = bias_in_panel_order(weight.bias, weight.gated)
    packed_groups = [
        _panels_of(group, bits, weight.gated) for group in _groups_of_one_type(parts, weight.gated)
    ]
    matrices = (Matrix * len(packed_groups))()
    first_panel = 0
    for index, (block_type, panels) in enumerate(packed_groups):
        has_next = index + 1 < len(packed_groups)
        matrices[index] = Matrix(
            packed=panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            next=addressof(matrices[index + 1]) if has_next else None,
            outputs=outputs,
            inputs=inputs,
            type=block_type,
            first=first_panel,
            panels=len(panels),
        )
        first_panel += len(panels)
    return PackedMatrix(
        matrices[0], [panels for _, panels in packed_groups], references=[matrices, bias]
    )


def bias_in_panel_order(
    bias: Float[Tensor, " out"], gated: bool = False
) -> Float[Tensor, "panels 32"]:
    """A bias in the order of the panels' outputs."""
    two_columns = bias.float()[:, None].expand(-1, 2)
    return matrix_in_panels(two_columns, gated)[:, 0, 0].contiguous()


def type_name(matrix: Tensor | PackedTensor) -> str:
    """The name of a matrix's type in a GGUF file; empty for plain numbers."""
    return "" if isinstance(matrix, Tensor) else matrix.type.name


def _groups_of_one_type(
    parts: Sequence[Tensor | PackedTensor], gated: bool
) -> list[list[Tensor | PackedTensor]]:
    """Neighbouring matrices of one type. Raises UserError where a panel would have two types."""
    groups = [list(group) for _, group in groupby(parts, type_name)]
    if len(groups) == 1:
        return groups
    group_outputs = [sum(matrix.shape[0] for matrix in group) for group in groups]
    if gated or any(outputs % PANEL for outputs in group_outputs[:-1]):
        types = " and ".join(type_name(matrix) or "numbers" for matrix in parts)
        raise UserError(
            f"matrices whose outputs share a panel of 32 are stored as {types}; set"
            " runtime.weights=null"
        )
    return groups


def _panels_of(
    parts: Sequence[Tensor | PackedTensor], bits: int | None, gated: bool
) -> tuple[int, Tensor]:
    """Matrices of one type, one after the other: their type in `quantized.h`, and their panels."""
    if not isinstance(parts[0], Tensor):
        return _panels_of_gguf(parts, gated)
    matrix = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if bits is None or matrix.shape[1] % BLOCK:
        return PLAIN, matrix_in_panels(matrix, gated)
    panels = []
    for rows in rows_in_panel_order(matrix, gated).split(CHUNK):
        scales, numbers = quantized(rows.view(len(rows), -1, BLOCK), bits)
        numbers = numbers.view(rows.shape)
        panels.append(blocks_of_panels([scales], [(numbers + OFFSETS[bits], bits)]))
    return Type.Q8_0 if bits == 8 else Type.Q4_0, torch.cat(panels)


def _panels_of_gguf(parts: Sequence[PackedTensor], gated: bool) -> tuple[int, Tensor]:
    """Tensors of a GGUF file of one type, with the scales and numbers that they have there."""
    block_type = parts[0].type
    block_bytes = GGML_QUANT_SIZES[block_type][1]
    stored = torch.from_numpy(np.concatenate([tensor.blocks() for tensor in parts]))
    panels = []
    for rows in rows_in_panel_order(stored, gated).split(CHUNK):
        scales, numbers = scales_and_numbers(rows.reshape(-1, block_bytes), block_type)
        scales_by_row = [scale.view(len(rows), -1, scale.shape[-1]) for scale in scales]
        numbers_by_row = [(values.reshape(len(rows), -1), bits) for values, bits in numbers]
        panels.append(blocks_of_panels(scales_by_row, numbers_by_row))
    return block_type, torch.cat(panels)


def scales_and_numbers(
    blocks: UInt8[Tensor, "n bytes"], block_type: Type
) -> tuple[list[Tensor], list[tuple[Tensor, int]]]:
    """The scales of GGML's blocks, [n, scales], and their whole numbers, [n, numbers], each with
    how many bits of it.

    They are in the order of `quantized.h`, where all numbers count from 0 on. Source: `gguf.quants`.
    """
    if block_type == Type.Q8_0:
        numbers = blocks[:, 2:34] ^ OFFSETS[8]  # as bytes, -128 to 127 plus 128
        return [_scales(blocks, 0, 2)], [(numbers, 8)]
    if block_type == Type.Q4_0:
        return [_scales(blocks, 0, 2)], [(_nibbles(blocks, 2, 18), 4)]
    if block_type == Type.Q5_0:
        high_bit = blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1  # [n, 4, 8]
        return [_scales(blocks, 0, 2)], [(_nibbles(blocks, 6, 22), 4), (high_bit, 1)]
    if block_type == Type.Q4_K:
        steps, minima = Q4_K.get_scale_min(blocks[:, 4:16].numpy())
        scales = [
            _scales(blocks, 0, 2),
            _scales(blocks, 2, 4),
            torch.from_numpy(steps),
            torch.from_numpy(minima),
        ]
        return scales, [(_nibbles(blocks, 16, 144, groups=4), 4)]
    # Q6_K: four bits of each number, then two more, four numbers a byte
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high_bits = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3
    scales = [_scales(blocks, 208, 210), _scales(blocks, 192, 208, torch.int8)]
    return scales, [(_nibbles(blocks, 0, 128, groups=2), 4), (high_bits, 2)]


def _nibbles(
    blocks: UInt8[Tensor, "n bytes"], start: int, stop: int, groups: int = 1
) -> UInt8[Tensor, "n groups 2 numbers"]:
    """Two numbers of four bits from each of these bytes: of each group first the lower bits of all
    its bytes, then the higher.
    """
    grouped = blocks[:, start:stop].unflatten(1, (groups, 1, -1))
    return torch.cat([grouped & 15, grouped >> 4], 2)


def _scales(
    blocks: UInt8[Tensor, "n bytes"], start: int, stop: int, dtype: torch.dtype = torch.half
) -> Tensor:
    """These bytes of each block, read as numbers of this type."""
    return blocks[:, start:stop].contiguous().view(dtype)


def blocks_of_panels(
    scales: Sequence[Float[Tensor, "rows blocks scales"]],
    numbers: Sequence[tuple[Float[Tensor, "rows in"], int]],
) -> UInt8[Tensor, "panels blocks bytes"]:
    """Rows in the panels' order as blocks for 32 outputs, laid out as `quantized.h` has them.

    numbers: whole, from 0 on, each with how many bits it has: 8, 4, 2 or 1.
    """
    block_count = scales[0].shape[1]
    # scales: [panels, blocks, scales, output]
    fields = [scale.view(-1, PANEL, *scale.shape[1:]).permute(0, 2, 3, 1) for scale in scales]
    for values, bits in numbers:
        runs = values.shape[1] // block_count // BLOCK  # how many times 32 inputs a block has
        words = _in_words(values.view(-1, 2, LANES, block_count, runs, BLOCK), bits)
        # numbers: [panels, blocks, 32 inputs, half, words, output]
        fields.append(words.permute(0, 3, 4, 1, 5, 2))
    as_bytes = [field.contiguous().flatten(2).view(torch.uint8) for field in fields]
    return torch.cat(as_bytes, -1)


def _in_words(values: Num[Tensor, "... inputs"], bits: int) -> Int32[Tensor, "... words"]:
    """Whole numbers of so many bits, packed into words of 32 bits along the last axis, as
    `Packed` of `quantized.h` holds them.

    Each byte of a word has one of four consecutive inputs; the groups of four that share a word
    follow each other from the lowest bits on.
    """
    numbers = values.to(torch.uint8).unflatten(-1, (-1, 8 // bits, 4))
    first_bit = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    words = (numbers << first_bit).sum(-2, dtype=torch.uint8)  # [..., words, 4 bytes]
    return words.view(torch.int32).flatten(-2)


def quantized(
    values: Float[Tensor, "... block"], bits: int
) -> tuple[Float[Tensor, "... 1"], Float[Tensor, "... block"]]:
    """The scale of each block, in float16, and its whole numbers, as GGML makes Q8_0 and Q4_0.

    8 bits: the largest magnitude becomes 127. 4 bits: the value of the largest magnitude becomes
    -8; the others are rounded to nearest in -8 to 7. A weight is scale times number.
    """
    values = values.float()
    minimum, maximum = torch.aminmax(values, dim=-1, keepdim=True)
    if bits == 8:
        scale = torch.maximum(-minimum, maximum) / 127
        smallest, largest = -127, 127
    else:
        scale = torch.where(-minimum > maximum, minimum, maximum) / -8
        smallest, largest = -8, 7
    scale = scale.half()
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    return scale, (values * inverse).round_().clamp_(smallest, largest)


def matrix_in_panels(matrix: Float[Tensor, "out in"], gated: bool) -> Tensor:
    """A matrix in panels of 32 outputs, as the kernels read it.

    float32: [panels, in / 2, 2, 32], the inputs padded to an even number. bfloat16: [panels, in /
    2, 32, 2], the inputs padded to a multiple of 32.
    """
    is_float32 = matrix.dtype == torch.float32
    missing_inputs = -matrix.shape[1] % (2 if is_float32 else PANEL)
    if missing_inputs:  # a pad of nothing would copy
        matrix = pad(matrix, (0, missing_inputs))
    pairs = rows_in_panel_order(matrix, gated).view(-1, PANEL, matrix.shape[1] // 2, 2)
    order = (0, 2, 3, 1) if is_float32 else (0, 2, 1, 3)
    return pairs.permute(order).contiguous()


def rows_in_panel_order(
    matrix: Float[Tensor, "out in"], gated: bool
) -> Float[Tensor, "panels*32 in"]:
    """The rows in the panels' order; rows are added until the last panel is full.

    gated: a panel holds 16 outputs of the gate and the 16 that they gate.
    """
    if not gated:
        missing_rows = -matrix.shape[0] % PANEL
        return pad(matrix, (0, 0, 0, missing_rows)) if missing_rows else matrix
    half = matrix.shape[0] // 2
    in_lanes = [
        pad(rows, (0, 0, 0, -half % LANES)).view(-1, LANES, matrix.shape[1])
        for rows in matrix.split(half)  # the gate, then what it gates
    ]
    return torch.stack(in_lanes, 1).flatten(0, 2)
