"""Keys and values of one sequence, in memory that is allocated once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.models.native.attention import PlacedRows, attend
from bild_lab.engine.session import on_device


class KeyValueCache:
    """Keys and values of every layer: [layers, heads, capacity, head_dim]. The caller tracks which slots are valid."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # zeros: masked slots must not hold NaN
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def write(
        self, layer: int, rows: PlacedRows, keys: Float[Tensor, "m heads dim"], values: Float[Tensor, "m heads dim"]
    ) -> None:
        """Store the keys and values of a layer's rows in their slots."""
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if isinstance(rows.slots, slice):
                store[:, rows.slots] = new.transpose(0, 1)
            else:
                store.index_copy_(1, rows.slots, new.transpose(0, 1))

    def attend(
        self, layer: int, rows: PlacedRows, queries: Float[Tensor, "m heads dim"], mask: Tensor | None, scale: float
    ) -> Float[Tensor, "m features"]:
        """Attention of the rows over the slots that they read. mask: as in `attention.attend`."""
        keys, values = self.keys[layer, :, : rows.stop], self.values[layer, :, : rows.stop]
        return attend(queries, keys, values, mask, scale)

    def gather(self, start: int, rows: Sequence[int], layers: slice) -> None:
        """Move these rows, counted from slot `start`, to slot `start` and the following; one gather for all layers."""
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
