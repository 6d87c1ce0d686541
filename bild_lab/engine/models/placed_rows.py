"""Where rows stand about to be run: their cache slots, their positions, and what each attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from bild_lab.engine.draft import Tree


@dataclass(frozen=True)
class PlacedRows:
    """Rows about to be run: their cache slots, positions and attention mask.

    slots: the cache slots they fill.
    stop: how many cache slots are read.
    positions: [m], logical: siblings in a tree share one.
    visible: [m stop], which slots each row attends to; None for a single row that attends to all of
        them.
    key_positions: [stop], the logical position of every slot; None if it is the slot's index.
    """

    slots: slice | Int[Tensor, " m"]
    stop: int
    positions: Int[Tensor, " m"]
    visible: Bool[Tensor, "m stop"] | None = None
    key_positions: Int[Tensor, " stop"] | None = None

    @property
    def count(self) -> int:
        return self.positions.shape[0]

    @property
    def row_positions(self) -> Int[Tensor, " m"]:
        return self.positions


def place_rows(
    start: int,
    count: int,
    device: torch.device,
    tree: Tree | None = None,
    reserved: int = 0,
    probe: Bool[Tensor, " m"] | None = None,
) -> PlacedRows:
    """Place `count` rows after `start` cached slots. The first `reserved` slots hold a prefix for
    probe rows only.

    tree: None for a chain; it may begin with rows that are cached. probe: [m], which rows are
    probes; None: no row.
    """
    slots, stop = slice(start, start + count), start + count
    first_position = start - reserved
    # 1. a single row sees all that is cached
    if count == 1 and not reserved and (tree is None or len(tree) == 1):
        # torch.tensor would synchronize
        return PlacedRows(slots, stop, torch.full((1,), first_position, device=device))
    # 2. the rows, or all of their tree: their positions, and which of them each row sees
    if tree is None:
        tree_positions = torch.arange(first_position, first_position + count, device=device)
        seen_in_tree = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    else:
        first_position -= len(tree) - count  # where the tree's first row stands
        tree_positions = first_position + tree.depths
        seen_in_tree = tree.ancestors[-count:]
    positions = tree_positions[-count:]
    # 3. the text before them, which all see, and the prefix, which probes see
    first_slot = first_position + reserved
    visible = torch.ones(count, stop, dtype=torch.bool, device=device)
    visible[:, first_slot:] = seen_in_tree
    if reserved:
        visible[:, :reserved] = False if probe is None else probe[:, None]
    elif tree is None:
        return PlacedRows(slots, stop, positions, visible)
    cached_positions = torch.arange(-reserved, first_position, device=device)
    key_positions = torch.cat([cached_positions, tree_positions])
    return PlacedRows(slots, stop, positions, visible, key_positions)
