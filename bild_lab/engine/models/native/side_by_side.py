"""Caches of several texts side by side, of different lengths, and rows of several texts in one
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.models.native.attention import KeyValueCache, fused_attention
from bild_lab.engine.models.native.t5 import Memory
from bild_lab.engine.models.placed_rows import PlacedRows
from bild_lab.engine.session import on_device


class Pool:
    """One tensor for the keys, and one for the values, of as many texts as are in a batch; and
    their sources.

    It grows by need: to the longest text so far and to the most texts at once. Slots of shorter
    texts are masked. For `SideBySide` rows it is the cache of all texts.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, heads, dim = shape
        self._nothing = torch.zeros(layers, 0, heads, 0, dim, dtype=dtype, device=device)
        self.clear()

    def clear(self) -> None:
        """Give back all memory. No text may lie here."""
        # [layers, texts, heads, slots, dim]
        self.keys = self.values = self.source_keys = self.source_values = self._nothing
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """The memory that it holds, whether texts are in it or not."""
        stores = (self.keys, self.values, self.source_keys, self.source_values)
        return sum(store.nbytes for store in stores)

    def take(self, capacity: int) -> PooledCache:
        """A place for a text of about so many slots.

        Between two batches nothing is kept of a pool that is too short, as copying it would take
        the memory of both.
        """
        if len(self._free) == self.keys.shape[1] and capacity > self.keys.shape[3]:
            self.clear()
        texts = self.keys.shape[1]
        if not self._free:
            more = max(1, 2 * texts)
            self._free, texts = list(range(more - 1, texts - 1, -1)), more
        self._grow(texts, capacity, 0)
        return PooledCache(self, self._free.pop())

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def reserve(self, slots: int) -> None:
        """Make sure that every text has so many slots."""
        self._grow(self.keys.shape[1], slots, 0)

    def remember(self, place: int, memory: Memory) -> Memory:
        """Store a text's source. Returns it as it lies here."""
        count = memory.keys.shape[2]
        self._grow(self.keys.shape[1], 0, count)
        keys, values = (
            store[:, place, :, :count] for store in (self.source_keys, self.source_values)
        )
        keys[:], values[:] = memory.keys, memory.values
        return Memory(keys, values)

    def _grow(self, texts: int, slots: int, source: int) -> None:
        """Make sure that there are so many texts, with so many slots each, and rows of the longest
        source.
        """
        self.keys, self.values = (grown(store, texts, slots) for store in (self.keys, self.values))
        sources = (self.source_keys, self.source_values)
        self.source_keys, self.source_values = (grown(store, texts, source) for store in sources)

    def write(
        self,
        layer: int,
        rows: SideBySide,
        keys: Float[Tensor, "m heads dim"],
        values: Float[Tensor, "m heads dim"],
    ) -> None:
        """As `KeyValueCache.write`."""
        self.keys[layer][rows.text, :, rows.slots] = keys
        self.values[layer][rows.text, :, rows.slots] = values

    def attend(
        self,
        layer: int,
        rows: SideBySide,
        queries: Float[Tensor, "m heads dim"],
        mask: Tensor,
        scale: float,
    ) -> Float[Tensor, "m features"]:
        """mask: [heads, n, widest, stop] to be added, or [n, widest, stop]: which slots are
        seen.
        """
        mask = mask[:, None] if mask.dtype == torch.bool else mask.transpose(0, 1)
        keys, values = self.keys[layer, :, :, : rows.stop], self.values[layer, :, :, : rows.stop]
        return rows.attend(queries, keys, values, mask, scale)


def grown(
    store: Float[Tensor, "layers texts heads slots dim"], texts: int, slots: int
) -> Float[Tensor, "layers more heads longer dim"]:
    """The stored rows with room for so many texts and slots.

    New slots are zeros: masked slots must not hold NaN.
    """
    more, longer = texts - store.shape[1], max(0, slots - store.shape[3])
    return pad(store, (0, 0, 0, longer, 0, 0, 0, more)) if more or longer else store


class PooledCache(KeyValueCache):
    """The cache of one text in a pool: a view, so that all that runs one text alone runs it here
    too.
    """

    def __init__(self, pool: Pool, place: int) -> None:
        self.pool, self.place = pool, place

    @property
    def keys(self) -> Float[Tensor, "layers heads slots dim"]:
        return self.pool.keys[:, self.place]

    @property
    def values(self) -> Float[Tensor, "layers heads slots dim"]:
        return self.pool.values[:, self.place]

    @property
    def capacity(self) -> int:
        return self.pool.keys.shape[3]

    def grown(self, capacity: int) -> PooledCache:
        self.pool.reserve(capacity)
        return self


@dataclass(frozen=True)
class SideBySide:
    """Placed rows of n texts, as `PlacedRows` for one. They are packed one after the other, [m].

    Attention sees them padded to [n, widest]. Padded rows see slot 0, and nothing reads them.

    places: [n], of the texts in the pool.
    row: [m], where each row is among the n * widest.
    slots: [m], in its text's cache.
    text: [m], the text's place in the pool.
    positions: [n, widest].
    visible: [n, widest, stop], each text's own slots alone.
    key_positions: [n, stop].
    row_positions: [m].
    """

    places: Int[Tensor, " n"]
    row: Int[Tensor, " m"]
    slots: Int[Tensor, " m"]
    text: Int[Tensor, " m"]
    stop: int
    positions: Int[Tensor, "n widest"]
    visible: Bool[Tensor, "n widest stop"]
    key_positions: Int[Tensor, "n stop"]
    row_positions: Int[Tensor, " m"]

    @property
    def count(self) -> int:
        return self.slots.shape[0]

    def attend(
        self,
        queries: Float[Tensor, "m heads dim"],
        keys: Float[Tensor, "texts kv_heads slots dim"],
        values: Float[Tensor, "texts kv_heads slots dim"],
        mask: Float[Tensor, "n heads widest slots"] | Bool[Tensor, "n heads widest slots"],
        scale: float,
    ) -> Float[Tensor, "m features"]:
        """Attention of each text's rows over its own slots."""
        padded = queries.new_zeros(self.positions.numel(), *queries.shape[1:])
        padded[self.row] = queries
        out = fused_attention(
            # [n, heads, widest, dim]
            padded.view(*self.positions.shape, *queries.shape[1:]).transpose(1, 2),
            keys[self.places],
            values[self.places],
            mask,
            scale,
        )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)[self.row]


def side_by_side(
    texts: Sequence[PlacedRows], places: Sequence[int], device: torch.device
) -> SideBySide:
    """Rows of several texts as one. places: of the texts in the pool."""
    widest = max(text.count for text in texts)
    stop = max(text.stop for text in texts)
    n = len(texts)
    visible = torch.zeros(n, widest, stop, dtype=torch.bool, device=device)
    visible[:, :, 0] = True  # for padded rows: a softmax over nothing is NaN
    positions = torch.zeros(n, widest, dtype=torch.long, device=device)
    keys = torch.arange(stop, device=device).repeat(n, 1)
    row, slots, owner = [], [], []
    for index, text in enumerate(texts):
        visible[index, : text.count, : text.stop] = True if text.visible is None else text.visible
        positions[index, : text.count] = text.positions
        if text.key_positions is not None:
            keys[index, : text.stop] = text.key_positions
        row += range(index * widest, index * widest + text.count)
        slots += range(text.slots.start, text.slots.stop)
        owner += [places[index]] * text.count
    where = on_device([*row, *slots, *owner], device).view(3, -1)
    row_positions = positions.flatten()[where[0]]
    return SideBySide(
        on_device(places, device), *where, stop, positions, visible, keys, row_positions
    )


class BatchedSources:
    """The sources of several texts, of different lengths, as one memory. lengths: of each."""

    def __init__(self, pool: Pool, rows: SideBySide, lengths: Sequence[int]) -> None:
        self._rows, longest = rows, max(lengths)
        self._keys, self._values = (
            store[:, :, :, :longest] for store in (pool.source_keys, pool.source_values)
        )
        places = torch.arange(longest, device=rows.row.device)
        # [n, 1, 1, longest]
        self._visible = (places < on_device(lengths, rows.row.device)[:, None])[:, None, None]

    def attend(
        self, layer: int, queries: Float[Tensor, "m heads dim"]
    ) -> Float[Tensor, "m features"]:
        """Attention of decoder rows over their own text's source."""
        return self._rows.attend(
            queries, self._keys[layer], self._values[layer], self._visible, scale=1.0
        )
