"""Weight matrices in the order in which the kernels read them."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.models.native.cpu.structures import Matrix
from bild_lab.engine.models.native.stack import Weight

LANES, PANEL = 16, 32  # columns of a vector, and of a panel of weights
BLOCK = 32  # inputs that share a scale, where weights are quantized
CHUNK = 256 * PANEL  # rows that are quantized at a time


def packed_matrix(weight: Weight, bits: int | None = None) -> tuple[Matrix, Tensor, Tensor | None]:
    """A linear layer for the kernels, and the tensors that it points to.

    bits: 8 or 4 to quantize it, if it has a multiple of 32 inputs; None: in its own precision.
    """
    bias = None
    if weight.bias is not None:  # in the order of the panels' outputs
        bias = panels(weight.bias.float()[:, None].expand(-1, 2), weight.gated)[:, 0, 0].contiguous()
    matrix = weight.matrix
    outputs, inputs = matrix.shape
    bits = None if inputs % BLOCK else bits
    packed = panels(matrix, weight.gated) if bits is None else quantized_panels(matrix, bits, weight.gated)
    return (
        Matrix(packed.data_ptr(), None if bias is None else bias.data_ptr(), outputs, inputs, bits or 0),
        packed,
        bias,
    )


def quantized_panels(
    matrix: Float[Tensor, "out in"], bits: int, gated: bool = False
) -> UInt8[Tensor, "panels blocks b"]:
    """A matrix as blocks of 32 inputs and 32 outputs, laid out as `quantized.h` has them, rounded to nearest."""
    rows = in_panels(matrix, gated)
    made = []
    for some in rows.split(CHUNK):  # so that little is in float32 at a time
        blocks = some.view(-1, PANEL, some.shape[1] // BLOCK, BLOCK).transpose(1, 2)
        scales, numbers = quantized(blocks, bits)
        numbers = numbers.view(*numbers.shape[:2], 2, LANES, BLOCK)
        if bits == 8:
            stored = numbers.to(torch.int8).transpose(-1, -2).contiguous()
        else:
            pairs = (numbers + 8).to(torch.uint8).unflatten(-1, (-1, 2))
            eights = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int32)
            stored = eights.transpose(-1, -2).contiguous()
        parts = scales.squeeze(-1).contiguous(), stored.flatten(2)
        made.append(torch.cat([part.view(torch.uint8) for part in parts], -1))
    return torch.cat(made)


def quantized(
    values: Float[Tensor, "... block"], bits: int
) -> tuple[Float[Tensor, "... 1"], Float[Tensor, "... block"]]:
    """The scale of each block, in float16, and its whole numbers, as GGML makes Q8_0 and Q4_0.

    8 bits: the largest magnitude becomes 127. 4 bits: the value of the largest magnitude becomes -8; the others are
    rounded to nearest in -8 to 7. A weight is scale times number.
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

    float32: [panels, in / 2, 2, 32]. bfloat16: [panels, in / 2, 32, 2], the inputs padded to a multiple of 32.
    """
    if matrix.dtype == torch.bfloat16 and matrix.shape[1] % PANEL:  # a pad of nothing would copy
        matrix = pad(matrix, (0, -matrix.shape[1] % PANEL))
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
    return torch.stack([part.view(-1, LANES, part.shape[1]) for part in (gate, up)], 1).flatten(0, 2)
