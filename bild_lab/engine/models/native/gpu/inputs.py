"""What the kernels read of a forward's rows: tables on the device, at addresses that a CUDA graph
keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.models.native.gpu.attention import LANES
from bild_lab.engine.models.native.gpu.products import TEXT_FIELDS
from bild_lab.engine.models.native.gpu.rows import trace_paths
from bild_lab.engine.models.native.gpu.tilings import power_of_two
from bild_lab.engine.models.native.packed_pass import SequenceSlice

MAX_ROWS = 64  # of a forward
MAX_TREE = 256  # rows of a text's tree, those that ran earlier among them
CHUNK = 64  # slots of a program of attention
MAX_LAYOUTS = 1024  # that are remembered
PINNED_PIECES = 4


class PassInputs:
    """The tables of one forward. All numbers are int64.

    row_table: [4, MAX_ROWS], each row's token, slot, position and text; a row without a slot is
        padding.
    text_table: [MAX_ROWS, fields].
    tile_table: [tiles, 3], as in `attend`: of the texts' queries, and from line `max_tiles` on of
        the rows of trees.
    scored_rows: [MAX_ROWS].
    paths: [MAX_ROWS, MAX_TREE], of the rows of trees, as in `attend`.
    """

    def __init__(self, queries_per_key: int, device: torch.device) -> None:
        self._group = queries_per_key
        self.tiles_per_row = -(-queries_per_key // int(LANES))
        self.max_tiles = power_of_two(MAX_ROWS * self.tiles_per_row)
        self._copied = CopiedTables(
            {
                "row_table": (4, MAX_ROWS),
                "text_table": (MAX_ROWS, int(TEXT_FIELDS)),
                "tile_table": (self.max_tiles + MAX_ROWS * self.tiles_per_row, 3),
                "scored_rows": (MAX_ROWS,),
            },
            device,
        )
        paths = torch.zeros(MAX_ROWS, MAX_TREE, dtype=torch.int64, device=device)
        self.tables = {
            **self._copied.tables,
            "paths": paths,
        }  # by the names of the kernels' parameters
        self.row_table: Int[Tensor, "4 rows"] = self.tables["row_table"]
        self.tokens: Int[Tensor, " rows"] = self.row_table[0]
        self._layouts: dict[tuple[tuple[int, int, bool], ...], tuple[np.ndarray, int]] = {}

    def fill(
        self,
        texts: Sequence[SequenceSlice],
        tokens: Sequence[int] | None = None,
        *,
        traces_paths: bool = True,
    ) -> int:
        """Write the tables for these texts' rows.

        tokens: of all rows, in the host's memory; None: they stay what they are, as another copy
        brings those of the device. traces_paths: write the paths and positions of a tree's rows;
        False: they come later.
        Returns the number of tiles of the texts' queries. The host does not wait for the device.
        """
        # 1. what the numbers of rows decide
        counts = tuple((text.count, text.scored, text.parents is not None) for text in texts)
        layout = self._layouts.get(counts)
        if layout is None:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[counts] = self._layout(counts)
        numbers, tiles = layout
        host = self._copied.next()
        host[:] = numbers
        row_table, text_table, *_ = self._copied.parts_of(host).values()
        # 2. where each text's rows stand
        first_row = 0
        for index, text in enumerate(texts):
            rows = slice(first_row, first_row + text.count)
            row_table[1, rows] += text.start
            row_table[2, rows] += text.start - text.reserved
            text_table[index] = text_fields(text)
            first_row = rows.stop
        if tokens is not None:
            row_table[0, : len(tokens)] = tokens
        self._copied.copy(first=MAX_ROWS if tokens is None else 0)
        if traces_paths and any(has_tree for _, _, has_tree in counts):
            self._trace_paths(texts)
        return tiles

    def _layout(self, counts: Sequence[tuple[int, int, bool]]) -> tuple[np.ndarray, int]:
        """The tables of texts of so many rows, of which so many are scored, with a tree or without,
        that begin at slot 0; and the number of tiles of their queries.
        """
        numbers = np.zeros(self._copied.size, dtype=np.int64)
        row_table, _, tile_table, scored_rows = self._copied.parts_of(numbers).values()
        row_table[1] = -1
        tile_table[:, 0] = -1
        first_row = tiles = scored = 0
        row_tiles = self.max_tiles
        for index, (count, scored_count, is_tree) in enumerate(counts):
            rows = slice(first_row, first_row + count)
            row_table[1, rows] = row_table[2, rows] = np.arange(count)
            row_table[3, rows] = index
            for first_query, last_query in self._tiles(rows):
                tile_table[tiles] = index, first_query, last_query
                tiles += 1
            for row in range(first_row, rows.stop if is_tree else first_row):
                for first_query, last_query in self._tiles(slice(row, row + 1)):
                    tile_table[row_tiles] = index, first_query, last_query
                    row_tiles += 1
            scored_rows[scored : scored + scored_count] = np.arange(
                rows.stop - scored_count, rows.stop
            )
            scored += scored_count
            first_row = rows.stop
        return numbers, tiles

    def _tiles(self, rows: slice) -> Iterator[tuple[int, int]]:
        """The first query of each tile of these rows, and the first that it lacks."""
        stop = rows.stop * self._group
        for query in range(rows.start * self._group, stop, int(LANES)):
            yield query, min(query + int(LANES), stop)

    def _trace_paths(self, texts: Sequence[SequenceSlice]) -> None:
        """Write the paths and positions of the rows of trees, on the device."""
        row = 0
        for text in texts:
            if text.parents is not None:
                trace_paths[(text.count,)](
                    text.parents.long().contiguous(),
                    self.tables["paths"][row:],
                    self.row_table[2, row:],
                    earlier_rows(text),
                    tree_start(text) - text.reserved,
                    MAX_DEPTH=MAX_TREE,
                )
            row += text.count


def text_fields(text: SequenceSlice) -> tuple[int, ...]:
    """A line of `text_table`, in the order of `products.py`."""
    source = source_keys = source_values = 0
    if text.memory is not None:
        keys, values = text.memory
        source, source_keys, source_values = keys.shape[2], keys.data_ptr(), values.data_ptr()
    cache = text.cache
    return (
        text.start,
        tree_start(text),
        cache.capacity,
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        source,
        source_keys,
        source_values,
        text.reserved,
    )


def earlier_rows(text: SequenceSlice) -> int:
    """How many rows of a text's tree ran before this pass."""
    return text.parents.shape[0] - text.count


def tree_start(text: SequenceSlice) -> int:
    """The slot where a text's tree begins; without one, the end of the cache's last chunk, as all of
    them are shared.
    """
    if text.parents is None:
        return -(-text.cache.capacity // CHUNK) * CHUNK
    return text.start - earlier_rows(text)


def tables_in(
    numbers: np.ndarray | Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Tables of these shapes, by name, that lie one after the other in a piece of memory."""
    tables, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        tables[name] = numbers[start:stop].reshape(shape)
        start = stop
    return tables


class CopiedTables:
    """Tables of these shapes, by name, in one piece of the device's memory, which one copy fills,
    without waiting for the device. All numbers are int64.

    A few pieces of the host's memory take turns, as a copy may still be waiting when the next table
    is written.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self.size = shapes, sum(map(math.prod, shapes.values()))
        self._memory = torch.zeros(self.size, dtype=torch.int64, device=device)
        self.tables: dict[str, Tensor] = self.parts_of(self._memory)
        self._pinned = device.type == "cuda"
        count = PINNED_PIECES if self._pinned else 1
        self._pieces = [
            torch.zeros(self.size, dtype=torch.int64, pin_memory=self._pinned) for _ in range(count)
        ]
        self._arrays = [piece.numpy() for piece in self._pieces]
        self._copied = [torch.cuda.Event() for _ in range(count)] if self._pinned else []
        self._place = 0

    def parts_of(self, numbers: np.ndarray | Tensor) -> dict[str, Any]:
        """The tables that lie in a piece of memory."""
        return tables_in(numbers, self._shapes)

    def next(self) -> np.ndarray:
        """The piece of the host's memory to write now; it holds what an earlier copy had."""
        self._place = (self._place + 1) % len(self._pieces)
        if self._pinned:
            self._copied[self._place].synchronize()
        return self._arrays[self._place]

    def copy(self, first: int = 0) -> None:
        """Copy what was written, from number `first` on."""
        self._memory[first:].copy_(self._pieces[self._place][first:], non_blocking=True)
        if self._pinned:
            self._copied[self._place].record()
