"""Weight matrices in the order in which the kernels read them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.models.native.cpu.structures import Matrix
from bild_lab.engine.models.native.stack import Weight

LANES, PANEL = 16, 32  # columns of a vector, and of a panel of weights


def packed_matrix(weight: Weight) -> tuple[Matrix, Tensor, Tensor | None]:
    """A linear layer for the kernels, and the tensors that it points to."""
    bias = None
    if weight.bias is not None:  # in the order of the panels' outputs
        bias = panels(weight.bias.float()[:, None].expand(-1, 2), weight.gated)[:, 0, 0].contiguous()
    packed = panels(weight.matrix, weight.gated)
    outputs, inputs = weight.matrix.shape
    return Matrix(packed.data_ptr(), None if bias is None else bias.data_ptr(), outputs, inputs), packed, bias


def panels(matrix: Float[Tensor, "out in"], gated: bool = False) -> Tensor:
    """A matrix in panels of 32 outputs, as the kernels read it; outputs are added until the last panel is full.

    float32: [panels, in / 2, 2, 32]. bfloat16: [panels, in / 2, 32, 2], the inputs padded to a multiple of 32. gated: a
    panel holds 16 outputs of the gate and the 16 that they gate.
    """
    if matrix.dtype == torch.bfloat16:
        matrix = pad(matrix, (0, -matrix.shape[1] % PANEL))
    if gated:
        half = matrix.shape[0] // 2
        gate, up = (pad(part, (0, 0, 0, -half % LANES)) for part in matrix.split(half))
        matrix = torch.stack([part.view(-1, LANES, part.shape[1]) for part in (gate, up)], 1).flatten(0, 2)
    else:
        matrix = pad(matrix, (0, 0, 0, -matrix.shape[0] % PANEL))
    pairs = matrix.view(-1, PANEL, matrix.shape[1] // 2, 2)
    order = (0, 2, 3, 1) if matrix.dtype == torch.float32 else (0, 2, 1, 3)
    return pairs.permute(order).contiguous()
