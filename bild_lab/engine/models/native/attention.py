"""Code shared by the T5 and Llama decoders: normalization, and attention over a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.session import on_device


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows one after the other; a single tensor itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def normalize(
    x: Float[Tensor, "*m dim"], weight: Float[Tensor, "*heads dim"], epsilon: float
) -> Float[Tensor, "*m dim"]:
    """Root-mean-square normalization. Half precision is computed in float32, as in PyTorch's
    kernel.

    weight: [dim] for all rows, or [1, heads, dim] for each head. If it has more precision than x,
    it is applied before the result is rounded to x's precision.
    """
    if weight.dtype != x.dtype:
        return normalize(x.to(weight.dtype), weight, epsilon).to(x.dtype)
    if weight.ndim == 1:
        return rms_norm(x, weight.shape, weight, epsilon)
    return rms_norm(x, x.shape[-1:], None, epsilon) * weight


def attend(
    queries: Float[Tensor, "m heads dim"],
    keys: Float[Tensor, "kv_heads n dim"],
    values: Float[Tensor, "kv_heads n dim"],
    mask: Tensor | None,
    scale: float,
) -> Float[Tensor, "m features"]:
    """Attention of each row over n slots. mask: broadcastable to [heads, m, n], boolean or
    additive.
    """
    out = fused_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        None if mask is None else mask[None],
        scale,
    )
    return out[0].transpose(0, 1).reshape(queries.shape[0], -1)


def fused_attention(
    queries: Float[Tensor, "batch heads m dim"],
    keys: Float[Tensor, "batch kv_heads n dim"],
    values: Float[Tensor, "batch kv_heads n dim"],
    mask: Tensor | None,
    scale: float | None = None,
) -> Float[Tensor, "batch heads m dim"]:
    """PyTorch's attention, of heads that may share keys. mask: broadcastable to [batch, heads, m, n],
    boolean or additive. scale: of the scores; None: one over the root of the width.

    On a GPU PyTorch's fused kernels take shared keys or a mask, and not both before version 2.14.
    Else it computes all scores, [heads, m, n], in float32, which long prompts have no memory for. So
    with a mask each head gets keys of its own there.
    """
    sharing = queries.shape[1] // keys.shape[1]
    if sharing > 1 and mask is not None and queries.is_cuda:
        keys, values = (
            shared[:, :, None].expand(-1, -1, sharing, -1, -1).flatten(1, 2)
            for shared in (keys, values)
        )
    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        scale=scale,
        enable_gqa=keys.shape[1] != queries.shape[1],
    )


class KeyValueCache:
    """Keys and values of every layer: [layers, heads, capacity, head_dim].

    The caller tracks which slots are valid.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        # zeros: masked slots must not hold NaN
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def write(
        self,
        layer: int,
        rows: PlacedRows,
        keys: Float[Tensor, "m heads dim"],
        values: Float[Tensor, "m heads dim"],
    ) -> None:
        """Store the keys and values of a layer's rows in their slots."""
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if isinstance(rows.slots, slice):
                store[:, rows.slots] = new.transpose(0, 1)
            else:
                store.index_copy_(1, rows.slots, new.transpose(0, 1))

    def attend(
        self,
        layer: int,
        rows: PlacedRows,
        queries: Float[Tensor, "m heads dim"],
        mask: Tensor | None,
        scale: float,
    ) -> Float[Tensor, "m features"]:
        """Attention of the rows over the slots that they read. mask: as in `attention.attend`."""
        keys, values = self.keys[layer, :, : rows.stop], self.values[layer, :, : rows.stop]
        return attend(queries, keys, values, mask, scale)

    def gather(self, start: int, rows: Sequence[int], layers: slice) -> None:
        """Move these rows, counted from slot `start`, to slot `start` and the following; one gather
        for all layers.
        """
        taken = on_device([start + row for row in rows], self.keys.device)  # [k]
        for store in (self.keys[layers], self.values[layers]):
            store[:, :, start : start + len(rows)] = store.index_select(2, taken)

    def grown(self, capacity: int) -> KeyValueCache:
        """A larger cache with the same rows."""
        layers, heads, _, dim = self.keys.shape
        larger = KeyValueCache((layers, heads, capacity, dim), self.keys.dtype, self.keys.device)
        larger.keys[:, :, : self.capacity] = self.keys
        larger.values[:, :, : self.capacity] = self.values
        return larger
