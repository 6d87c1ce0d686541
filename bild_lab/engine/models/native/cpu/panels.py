"""Weight matrices in the order in which the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from itertools import groupby

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import Q4_K
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.models.checkpoint.gguf_file import PackedTensor
from bild_lab.engine.models.native.cpu.structures import Matrix
from bild_lab.engine.models.native.stack import Weight
from bild_lab.errors import UserError

LANES, PANEL = 16, 32  # columns of a vector, and of a panel of weights
BLOCK = 32  # inputs that share a scale, where weights are quantized
CHUNK = 256 * PANEL  # rows that are quantized at a time
PLAIN = 0  # the type of a matrix whose numbers are not in blocks


def packed_matrix(
    weight: Weight, bits: int | None = None
) -> tuple[Matrix, list[Tensor], list[object]]:
    """A linear layer for the kernels, its packed weights, and what else it points to.

    bits: 8 or 4 to quantize it, if it has a multiple of 32 inputs; None: in its own precision.
    Tensors of a GGUF file keep their scales and numbers. Raises UserError where outputs of one
    panel have different types.
    """
    bias = None if weight.bias is None else in_panel_order(weight.bias, weight.gated)
    parts = weight.matrix if isinstance(weight.matrix, tuple) else (weight.matrix,)
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    alike = [list(group) for _, group in groupby(parts, kind_of)]
    if len(alike) > 1 and (
        weight.gated or any(sum(part.shape[0] for part in group) % PANEL for group in alike[:-1])
    ):
        kinds = " and ".join(kind_of(part) or "numbers" for part in parts)
        raise UserError(
            f"matrices whose outputs share a panel of 32 are stored as {kinds}; set"
            " runtime.weights=null"
        )
    made = [_in_panels(group, bits, weight.gated) for group in alike]
    matrices, first = (Matrix * len(made))(), 0
    for index, (kind, packed) in enumerate(made):
        after = addressof(matrices[index + 1]) if index + 1 < len(made) else None
        address = None if bias is None else bias.data_ptr()
        matrices[index] = Matrix(
            packed.data_ptr(), address, after, outputs, inputs, kind, first, len(packed)
        )
        first += len(packed)
    return matrices[0], [packed for _, packed in made], [matrices, bias]


def in_panel_order(bias: Float[Tensor, " out"], gated: bool = False) -> Float[Tensor, "panels 32"]:
    """A bias in the order of the panels' outputs."""
    return panels(bias.float()[:, None].expand(-1, 2), gated)[:, 0, 0].contiguous()


def kind_of(part: Tensor | PackedTensor) -> str:
    """The name of its type in a GGUF file; none for plain numbers."""
    return "" if isinstance(part, Tensor) else part.type.name


def _in_panels(
    parts: Sequence[Tensor | PackedTensor], bits: int | None, gated: bool
) -> tuple[int, Tensor]:
    """Matrices one after the other: their type in `quantized.h`, and their panels."""
    if not isinstance(parts[0], Tensor):
        return _as_packed(parts, gated)
    matrix = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if bits is None or matrix.shape[1] % BLOCK:
        return PLAIN, panels(matrix, gated)
    made = []
    for rows in in_panels(matrix, gated).split(CHUNK):  # so that little is in float32 at a time
        scales, numbers = quantized(rows.view(len(rows), -1, BLOCK), bits)
        numbers = numbers.view(rows.shape)
        made.append(
            in_blocks([scales], [(numbers.to(torch.int8), 8) if bits == 8 else (numbers + 8, 4)])
        )
    return Type.Q8_0 if bits == 8 else Type.Q4_0, torch.cat(made)


def _as_packed(parts: Sequence[PackedTensor], gated: bool) -> tuple[int, Tensor]:
    """Tensors of a GGUF file of one type, with the scales and numbers that they have there.

    Q5_0 becomes Q8_0.
    """
    kind, made = parts[0].type, []
    stored = torch.from_numpy(np.concatenate([part.blocks() for part in parts]))
    for rows in in_panels(stored, gated).split(CHUNK):
        scales, numbers = unpacked(rows.reshape(-1, GGML_QUANT_SIZES[kind][1]), kind)
        made.append(
            in_blocks(
                [scale.view(len(rows), -1, scale.shape[-1]) for scale in scales],
                [(each.reshape(len(rows), -1), bits) for each, bits in numbers],
            )
        )
    return Type.Q8_0 if kind == Type.Q5_0 else kind, torch.cat(made)


def unpacked(
    blocks: UInt8[Tensor, "n bytes"], kind: Type
) -> tuple[list[Tensor], list[tuple[Tensor, int]]]:
    """The scales of GGML's blocks, [n, scales], and their whole numbers, [n, numbers], each with
    how many bits of it.

    In the order of `quantized.h`; numbers of fewer than 8 bits count from 0 on. Source:
    `gguf.quants`.
    """

    def halves(first: int, last: int, groups: int) -> Tensor:
        """In each group of bytes the lower four bits come first, then the higher."""
        some = blocks[:, first:last].unflatten(1, (groups, 1, -1))
        return torch.cat([some & 15, some >> 4], 2)

    def scales(first: int, last: int, dtype: torch.dtype = torch.half) -> Tensor:
        return blocks[:, first:last].contiguous().view(dtype)

    if kind == Type.Q8_0:
        return [scales(0, 2)], [(scales(2, 34, torch.int8), 8)]
    if kind == Type.Q4_0:
        return [scales(0, 2)], [(halves(2, 18, 1), 4)]
    if kind == Type.Q5_0:
        fifth = blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1  # [n, 4, 8]
        numbers = (
            halves(6, 22, 1).flatten(1).to(torch.int8) + 16 * fifth.flatten(1).to(torch.int8) - 16
        )
        return [scales(0, 2)], [(numbers, 8)]
    if kind == Type.Q4_K:
        steps, minima = (
            torch.from_numpy(each) for each in Q4_K.get_scale_min(blocks[:, 4:16].numpy())
        )
        return [scales(0, 2), scales(2, 4), steps, minima], [(halves(16, 144, 4), 4)]
    twos = (
        blocks[:, 128:192].unflatten(1, (2, 1, 32))
        >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
        & 3
    )
    return [scales(208, 210), scales(192, 208, torch.int8)], [(halves(0, 128, 2), 4), (twos, 2)]


def in_blocks(
    scales: Sequence[Float[Tensor, "rows blocks each"]],
    numbers: Sequence[tuple[Float[Tensor, "rows in"], int]],
) -> UInt8[Tensor, "panels blocks bytes"]:
    """Rows in the panels' order as blocks for 32 outputs, laid out as `quantized.h` has them.

    numbers: whole, each with how many of its bits are kept: 8, or the lowest 4 or 2 of the inputs
    that share a word.
    """
    blocks = scales[0].shape[1]
    parts = [each.view(-1, PANEL, *each.shape[1:]).permute(0, 2, 3, 1) for each in scales]
    for values, bits in numbers:
        values = values.view(-1, 2, LANES, blocks, values.shape[1] // blocks // BLOCK, BLOCK)
        if bits < 8:
            several = values.to(torch.int32).unflatten(-1, (-1, 32 // bits))
            values = (several << torch.arange(0, 32, bits, dtype=torch.int32)).sum(
                -1, dtype=torch.int32
            )
        # [panels, blocks, 32 inputs, half, inputs, output]
        parts.append(values.permute(0, 3, 4, 1, 5, 2))
    return torch.cat([part.contiguous().flatten(2).view(torch.uint8) for part in parts], -1)


def quantized(
    values: Float[Tensor, "... block"], bits: int
) -> tuple[Float[Tensor, "... 1"], Float[Tensor, "... block"]]:
    """The scale of each block, in float16, and its whole numbers, as GGML makes Q8_0 and Q4_0.

    8 bits: the largest magnitude becomes 127. 4 bits: the value of the largest magnitude becomes
    -8; the others are rounded to nearest in -8 to 7. A weight is scale times number.
    """
    values = values.float()
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    if bits == 8:
        scale, least, most = torch.maximum(-low, high) / 127, -127, 127
    else:
        scale, least, most = torch.where(-low > high, low, high) / -8, -8, 7
    scale = scale.half()
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    return scale, (values * inverse).round_().clamp_(least, most)


def panels(matrix: Float[Tensor, "out in"], gated: bool = False) -> Tensor:
    """A matrix in panels of 32 outputs, as the kernels read it.

    float32: [panels, in / 2, 2, 32], the inputs padded to an even number. bfloat16: [panels, in /
    2, 32, 2], the inputs padded to a multiple of 32.
    """
    # a pad of nothing would copy
    if missing := -matrix.shape[1] % (2 if matrix.dtype == torch.float32 else PANEL):
        matrix = pad(matrix, (0, missing))
    pairs = in_panels(matrix, gated).view(-1, PANEL, matrix.shape[1] // 2, 2)
    order = (0, 2, 3, 1) if matrix.dtype == torch.float32 else (0, 2, 1, 3)
    return pairs.permute(order).contiguous()


def in_panels(matrix: Float[Tensor, "out in"], gated: bool) -> Float[Tensor, "panels*32 in"]:
    """The rows in the panels' order; rows are added until the last panel is full.

    gated: a panel holds 16 outputs of the gate and the 16 that they gate.
    """
    if not gated:
        missing = -matrix.shape[0] % PANEL
        return pad(matrix, (0, 0, 0, missing)) if missing else matrix
    half = matrix.shape[0] // 2
    gate, up = (pad(part, (0, 0, 0, -half % LANES)) for part in matrix.split(half))
    return torch.stack([part.view(-1, LANES, part.shape[1]) for part in (gate, up)], 1).flatten(
        0, 2
    )
