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
    TEXT_COUNT,
    TEXT_FIELDS,
    TEXT_FIRST_ROW,
    TEXT_FRESH,
    TEXT_KEYS,
    TEXT_RESERVED,
    TEXT_SOURCE,
    TEXT_SOURCE_KEYS,
    TEXT_SOURCE_VALUES,
    TEXT_TREE_PLACE,
    TEXT_TREE_START,
    TEXT_VALUES,
)
from bild_lab.engine.models.native.gpu.rows import trace_ancestors
from bild_lab.engine.models.native.packed_pass import SequenceSlice

MAX_ROWS = 64  # of a forward
WORDS = 4  # of 64 bits, one for each row of a tree
MAX_TREE = 64 * WORDS
# bits of the rows that row i of a chain sees: 0 to i
CHAIN_BITS = np.array([(1 << (row + 1)) - 1 for row in range(64)], dtype=np.uint64).view(np.int64)


class PassInputs:
    """The tables of one forward. All numbers are int64.

    row_table: [4, MAX_ROWS], each row's token, slot, position and text; a row without a slot is
    padding. text_table: [MAX_ROWS, fields]. tile_table: [tiles, 2], as in `attend`. ancestors:
    [MAX_ROWS, WORDS]. scored_rows: [MAX_ROWS]. tree_positions: of each row of a chain, then of
    MAX_TREE rows of each text's tree.
    """

    def __init__(self, queries_per_key: int, device: torch.device) -> None:
        self._group = queries_per_key
        self.max_tiles = MAX_ROWS + -(-MAX_ROWS * queries_per_key // int(LANES))
        shapes = {
            "row_table": (4, MAX_ROWS),
            "text_table": (MAX_ROWS, int(TEXT_FIELDS)),
            "tile_table": (self.max_tiles, 2),
            "ancestors": (MAX_ROWS, WORDS),
            "scored_rows": (MAX_ROWS,),
            "chain_positions": (MAX_ROWS,),
        }
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        # 1. the host's tables, and their copy on the device, each one piece of memory
        self._host = np.zeros(sum(sizes), dtype=np.int64)
        self._device = torch.zeros(
            sum(sizes) + MAX_ROWS * MAX_TREE, dtype=torch.int64, device=device
        )
        starts = np.cumsum([0, *sizes])
        host, tables = {}, {}
        for (name, shape), start, size in zip(shapes.items(), starts, sizes, strict=False):
            host[name] = self._host[start : start + size].reshape(shape)
            tables[name] = self._device[start : start + size].view(shape)
        self._tables = host
        # 2. what the kernels read
        self.row_table: Int[Tensor, "4 rows"] = tables["row_table"]
        self.text_table: Int[Tensor, "texts fields"] = tables["text_table"]
        self.tile_table: Int[Tensor, "tiles 2"] = tables["tile_table"]
        self.ancestors: Int[Tensor, "rows words"] = tables["ancestors"]
        self.scored_rows: Int[Tensor, " rows"] = tables["scored_rows"]
        self.tree_positions: Int[Tensor, " positions"] = self._device[starts[-2] :]
        self.tokens: Int[Tensor, " rows"] = self.row_table[0]

    def fill(self, texts: Sequence[SequenceSlice]) -> int:
        """Write the tables for these texts' rows, without the tokens, which stay what they are.

        Returns the number of tiles. The host does not wait for the device.
        """
        tables = self._tables
        tables["row_table"][1] = -1
        tables["tile_table"][:, 0] = -1
        first_row = tiles = scored = 0
        trees = []
        for index, text in enumerate(texts):
            rows = slice(first_row, first_row + text.count)
            earlier, tree_place = 0, first_row
            if text.parents is not None:
                earlier = text.parents.shape[0] - text.count
                tree_place = MAX_ROWS + index * MAX_TREE
                trees.append((text, first_row, tree_place, earlier))
            tree_start = text.start - earlier
            # 1. the rows, as those of a chain
            numbers = np.arange(text.count)
            tables["row_table"][1, rows] = text.start + numbers
            tables["row_table"][2, rows] = text.start - text.reserved + numbers
            tables["row_table"][3, rows] = index
            tables["chain_positions"][rows] = text.start - text.reserved + numbers
            tables["ancestors"][rows] = 0
            tables["ancestors"][rows, 0] = CHAIN_BITS[: text.count]
            # 2. their text
            self._set_text(index, text, first_row, tree_start, tree_place)
            # 3. the tiles of their queries, and which are scored
            for first_query in range(0, text.count * self._group, int(LANES)):
                tables["tile_table"][tiles] = index, first_query
                tiles += 1
            tables["scored_rows"][scored : scored + text.scored] = np.arange(
                rows.stop - text.scored, rows.stop
            )
            scored += text.scored
            first_row = rows.stop
        self._copy_to_device()
        for text, row, tree_place, earlier in trees:
            self._place_tree(text, row, tree_place, earlier)
        return tiles

    def _set_text(
        self, index: int, text: SequenceSlice, first_row: int, tree_start: int, tree_place: int
    ) -> None:
        """Write the fields of a text."""
        fields = self._tables["text_table"][index]
        fields[TEXT_FIRST_ROW] = first_row
        fields[TEXT_COUNT] = text.count
        fields[TEXT_FRESH] = text.start
        fields[TEXT_TREE_START] = tree_start
        fields[TEXT_TREE_PLACE] = tree_place
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

    def _place_tree(self, text: SequenceSlice, row: int, tree_place: int, earlier: int) -> None:
        """Write the ancestors and positions of a tree's rows, on the device."""
        parents = text.parents.long().contiguous()
        root_position = text.start - earlier - text.reserved
        positions = self.tree_positions[tree_place:]
        trace_ancestors[(parents.shape[0],)](
            parents, self.ancestors[row:], positions, earlier, root_position, WORDS=WORDS
        )
        self.row_table[2, row : row + text.count] = positions[earlier : parents.shape[0]]
