"""What the kernels need to know of a decoder, and its matrices in the order in which they read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.models.native.cpu.structures import Matrix

ACTIVATIONS = ("relu", "silu", "gelu_tanh", "gelu")  # in the order of `vectors.h`
LANES, PANEL = 16, 32  # columns of a vector, and of a panel of weights


@dataclass(frozen=True)
class Weight:
    """A linear layer: [out, in], and a bias. gated: the first half of the outputs gates the other half."""

    matrix: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None = None
    gated: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerOutline:
    """One decoder layer as the kernels know it.

    head_norm: [heads + kv_heads, head_dim]. out_norm, feed_out_norm: of what a block adds to the residual stream.
    window: how many positions back a row sees, 0 for all. kind: which of the rotations it has.
    """

    norm: Float[Tensor, " dim"]
    qkv: Weight
    out: Weight
    feed_norm: Float[Tensor, " dim"]
    inner: Weight
    outer: Weight
    head_norm: Tensor | None = None
    out_norm: Float[Tensor, " dim"] | None = None
    feed_out_norm: Float[Tensor, " dim"] | None = None
    cross_norm: Float[Tensor, " dim"] | None = None
    cross_query: Weight | None = None
    cross_out: Weight | None = None
    window: int = 0
    kind: int = 0


@dataclass(frozen=True, kw_only=True)
class DecoderOutline:
    """A decoder as the kernels know it.

    activation: one of ACTIVATIONS. scale: of attention scores. final_scale: of what the head reads.
    distance_bias: added to a score by the query's position minus the key's, the last for all beyond. bidirectional: an
    encoder, whose rows see all others; its distance_bias begins with the key that lies farthest ahead.
    """

    layers: Sequence[LayerOutline]
    embedding: Float[Tensor, "vocab dim"]
    head: Float[Tensor, "vocab dim"]
    final_norm: Float[Tensor, " dim"]
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    activation: str
    epsilon: float
    scale: float = 1.0
    final_scale: float = 1.0
    embedding_scale: float = 1.0
    distance_bias: Float[Tensor, "heads distances"] | None = None
    bidirectional: bool = False


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
