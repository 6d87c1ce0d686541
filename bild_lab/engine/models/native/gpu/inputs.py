"""What the kernels read of a forward's rows: tables on the device, at addresses that a CUDA graph
keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.models.native.gpu.attention import LANES
from bild_lab.engine.models.native.gpu.products import (
    TEXT_CAPACITY,
    TEXT_FIELDS,
    TEXT_FRESH,
    TEXT_KEYS,
    TEXT_RESERVED,
    TEXT_SOURCE,
    TEXT_SOURCE_KEYS,
    TEXT_SOURCE_VALUES,
    TEXT_TREE_START,
    TEXT_VALUES,
)
from bild_lab.engine.models.native.gpu.rows import trace_paths
from bild_lab.engine.models.native.packed_pass import SequenceSlice

MAX_ROWS = 64  # of a forward
MAX_TREE = 256  # rows of a text's tree, those that ran earlier among them


class PassInputs:
    """The tables of one forward. All numbers are int64.

    row_table: [4, MAX_ROWS], each row's token, slot, position and text; a row without a slot is
    padding. text_table: [MAX_ROWS, fields]. tile_table: [tiles, 3], as in `attend`. scored_rows:
    [MAX_ROWS]. paths: [MAX_ROWS, MAX_TREE], of the rows of trees, as in `attend`.
    """

    def __init__(self, queries_per_key: int, device: torch.device) -> None:
        self._group = queries_per_key
        self.max_tiles = MAX_ROWS * (1 + -(-queries_per_key // int(LANES)))
        shapes = {
            "row_table": (4, MAX_ROWS),
            "text_table": (MAX_ROWS, int(TEXT_FIELDS)),
            "tile_table": (self.max_tiles, 3),
            "scored_rows": (MAX_ROWS,),
        }
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        # 1. the host's tables, and their copy on the device, each one piece of memory
        self._host = np.zeros(sum(sizes), dtype=np.int64)
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        starts = np.cumsum([0, *sizes])
        host, tables = {}, {}
        for (name, shape), start, size in zip(shapes.items(), starts, sizes, strict=False):
            host[name] = self._host[start : start + size].reshape(shape)
            tables[name] = self._device[start : start + size].view(shape)
        self._tables = host
        # 2. what the kernels read
        self.row_table: Int[Tensor, "4 rows"] = tables["row_table"]
        self.text_table: Int[Tensor, "texts fields"] = tables["text_table"]
        self.tile_table: Int[Tensor, "tiles 3"] = tables["tile_table"]
        self.scored_rows: Int[Tensor, " rows"] = tables["scored_rows"]
        self.paths: Int[Tensor, "rows depths"] = torch.zeros(
            MAX_ROWS, MAX_TREE, dtype=torch.int64, device=device
        )
        self.tokens: Int[Tensor, " rows"] = self.row_table[0]

    def fill(self, texts: Sequence[SequenceSlice]) -> int:
        """Write the tables for these texts' rows, without the tokens, which stay what they are.

        Returns the number of tiles. The host does not wait for the device.
        """
        tables = self._tables
        tables["row_table"][1] = -1
        tables["tile_table"][:, 0] = -1
        has_tree = any(text.parents is not None for text in texts)
        first_row = tiles = scored = 0
        for index, text in enumerate(texts):
            rows = slice(first_row, first_row + text.count)
            numbers = np.arange(text.count)
            # 1. the rows, as those of a chain, and their text
            tables["row_table"][1, rows] = text.start + numbers
            tables["row_table"][2, rows] = text.start - text.reserved + numbers
            tables["row_table"][3, rows] = index
            self._set_text(index, text)
            # 2. the tiles of their queries: with a tree each row's by themselves
            together = 1 if has_tree else text.count
            for row in range(first_row, rows.stop, together):
                stop = (row + together) * self._group
                for query in range(row * self._group, stop, int(LANES)):
                    last_query = min(query + int(LANES), stop)
                    tables["tile_table"][tiles] = index, query, last_query
                    tiles += 1
            # 3. which are scored
            tables["scored_rows"][scored : scored + text.scored] = np.arange(
                rows.stop - text.scored, rows.stop
            )
            scored += text.scored
            first_row = rows.stop
        self._copy_to_device()
        if has_tree:
            self._trace_paths(texts)
        return tiles

    def _set_text(self, index: int, text: SequenceSlice) -> None:
        """Write the fields of a text."""
        fields = self._tables["text_table"][index]
        fields[TEXT_FRESH] = text.start
        fields[TEXT_TREE_START] = text.start - earlier_rows(text)
        fields[TEXT_CAPACITY] = text.cache.capacity
        fields[TEXT_KEYS] = text.cache.keys.data_ptr()
        fields[TEXT_VALUES] = text.cache.values.data_ptr()
        fields[TEXT_RESERVED] = text.reserved
        if text.memory is not None:
            keys, values = text.memory
            fields[TEXT_SOURCE] = keys.shape[2]
            fields[TEXT_SOURCE_KEYS] = keys.data_ptr()
            fields[TEXT_SOURCE_VALUES] = values.data_ptr()

    def _copy_to_device(self) -> None:
        host = torch.from_numpy(self._host)
        tokens = MAX_ROWS  # which another copy brings
        if self._device.is_cuda:
            # pinned memory that PyTorch keeps until the copy is done
            host = host.clone().pin_memory()
        self._device[tokens : len(host)].copy_(host[tokens:], non_blocking=True)

    def _trace_paths(self, texts: Sequence[SequenceSlice]) -> None:
        """Write the paths and positions of all rows, on the device. A chain is a tree, too."""
        row = 0
        for text in texts:
            parents = text.parents
            if parents is None:
                parents = torch.arange(-1, text.count - 1, device=self.paths.device)
            earlier = earlier_rows(text)
            root_position = text.start - earlier - text.reserved
            trace_paths[(text.count,)](
                parents.long().contiguous(),
                self.paths[row:],
                self.row_table[2, row:],
                earlier,
                root_position,
                MAX_DEPTH=MAX_TREE,
            )
            row += text.count


def earlier_rows(text: SequenceSlice) -> int:
    """How many rows of a text's tree ran before this pass."""
    return 0 if text.parents is None else text.parents.shape[0] - text.count
