"""Which keys a tree's rows see in a model with windows."""

from __future__ import annotations

import torch
from torch import Tensor

from bild_lab.engine.models.hf.layer_control import along_branches
from bild_lab.engine.models.placed_rows import PlacedRows

WINDOW = 2


def near(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """A model's own rule, by positions."""
    return (key <= row) & (key > row - WINDOW)


def test_a_row_sees_a_prefix_its_window_of_the_text_and_its_own_branch() -> None:
    # slots: a prefix of two, a text of three, then two rows at one position, and a child of the first
    keys = torch.tensor([-2, -1, 0, 1, 2, 3, 3, 4])
    visible = torch.ones(3, 8, dtype=torch.bool)
    visible[0, 6:] = visible[1, [5, 7]] = visible[2, 6] = False
    placed = PlacedRows(slice(5, 8), 8, torch.tensor([3, 3, 4]), visible, keys)
    mask = along_branches(placed, near)
    rows, slots = torch.arange(5, 8)[:, None], torch.arange(8)[None]
    seen = mask(torch.tensor(0), torch.tensor(0), rows, slots)
    assert [row.nonzero().flatten().tolist() for row in seen] == [
        [0, 1, 4, 5],
        [0, 1, 4, 6],
        [0, 1, 5, 7],
    ]
