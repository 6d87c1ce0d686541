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
    start_position = start - reserved  # logical position of the first row
    if count == 1 and not reserved and (tree is None or len(tree) == 1):
        # torch.tensor would synchronize
        return PlacedRows(slots, stop, torch.full((1,), start_position, device=device))
    if tree is None:
        behind = torch.arange(start_position, start_position + count, device=device)
        among = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    else:
        start_position -= len(tree) - count  # where the tree's first row stands
        behind, among = start_position + tree.depths, tree.ancestors[-count:]
    positions, root = behind[-count:], start_position + reserved
    visible = torch.ones(count, stop, dtype=torch.bool, device=device)
    visible[:, root:] = among
    if reserved:
        visible[:, :reserved] = False if probe is None else probe[:, None]
    elif tree is None:
        return PlacedRows(slots, stop, positions, visible)
    return PlacedRows(
        slots,
        stop,
        positions,
        visible,
        torch.cat([torch.arange(-reserved, start_position, device=device), behind]),
    )
