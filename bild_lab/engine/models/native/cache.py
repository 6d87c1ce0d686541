"""Keys and values of one sequence, in memory that is allocated once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.session import rows_of


class KeyValueCache:
    """Keys and values of every layer: [layers, heads, capacity, head_dim], filled up to `length`.

    Rolling back is setting `length`. The first `reserved` slots hold a prefix and never roll back.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # zeros: masked slots must not hold NaN
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def write(
        self,
        layer: int,
        slots: slice | Int[Tensor, " m"],
        keys: Float[Tensor, "m heads dim"],
        values: Float[Tensor, "m heads dim"],
    ) -> None:
        """Store a layer's rows."""
        for store, rows in ((self.keys[layer], keys), (self.values[layer], values)):
            if isinstance(slots, slice):
                store[:, slots] = rows.transpose(0, 1)
            else:
                store.index_copy_(1, slots, rows.transpose(0, 1))

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Of the rows from slot `start` on, keep these, in order; one gather over all layers."""
        if list(path) != list(range(len(path))):
            rows = rows_of([start + row for row in path], self.keys.device)  # [k]
            stop = start + len(path)
            self.keys[:, :, start:stop] = self.keys.index_select(2, rows)
            self.values[:, :, start:stop] = self.values.index_select(2, rows)
        self.length = start + len(path)

    def grown(self, capacity: int) -> KeyValueCache:
        """A larger cache with the same rows."""
        layers, heads, _, dim = self.keys.shape
        larger = KeyValueCache((layers, heads, capacity, dim), self.keys.dtype, self.keys.device)
        larger.keys[:, :, : self.capacity] = self.keys  # rows that a view drafted lie behind `length`
        larger.values[:, :, : self.capacity] = self.values
        larger.length = self.length
        return larger
