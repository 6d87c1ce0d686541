"""What the CPU kernels need to know of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

ACTIVATIONS = ("relu", "silu", "gelu_tanh", "gelu")  # in the order of `forward.cpp`


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
