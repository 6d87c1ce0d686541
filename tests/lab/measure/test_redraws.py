"""When two drafts after one text are drawn alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bild_lab.engine.draft import ROOT, Draft, empty_draft
from bild_lab.lab.measure.redraws import drawn_alike

Q = torch.tensor([0.5, 0.3, 0.2])
OTHER = torch.tensor([0.2, 0.3, 0.5])
ROUNDED, MOVED = (torch.tensor([0.5 - moved, 0.3, 0.2 + moved]) for moved in (0.08, 0.12))
NONE = empty_draft(torch.device("cpu"))


def drawn(*tokens: int, rows: tuple[torch.Tensor, ...] = (Q, Q, Q)) -> Draft:
    return Draft(torch.tensor(tokens), probs=torch.stack(rows[: len(tokens)]))


def tree(*tokens: int, row: torch.Tensor = Q) -> Draft:
    return replace(drawn(*tokens, rows=(row, row, row)), parents=torch.tensor([ROOT] * len(tokens)))


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (NONE, NONE, True),
        (NONE, Draft(torch.tensor([1])), True),  # nothing was drawn
        (drawn(1), NONE, False),
        (drawn(1), Draft(torch.tensor([1])), False),
        (drawn(1, 2), drawn(1, 2), True),
        (drawn(1, 2), drawn(1), False),
        (drawn(1, 2), drawn(0), True),  # an end token, or unsure after it
        (drawn(1, 2), drawn(0, rows=(OTHER,)), False),
        (drawn(1, 2), drawn(0, rows=(ROUNDED,)), True),
        (drawn(1, 2), drawn(0, rows=(MOVED,)), False),
        (drawn(1, 2), drawn(1, 0, rows=(Q, OTHER)), False),
        (drawn(1, 2), drawn(0, 0, rows=(Q, OTHER)), True),
        (drawn(1, 2), drawn(0, 0, rows=(Q + 1e-3, OTHER)), True),  # rounding
        (drawn(1), drawn(0, rows=(torch.tensor([0.5, 0.5]),)), False),
        (tree(1, 2), tree(1), True),
        (tree(1, 2), tree(1, row=OTHER), False),
        (tree(1, 2), drawn(1), True),
    ],
)
def test_a_token_is_drawn_alike_if_it_is_drawn_from_one_q_whatever_it_is(
    first: Draft, second: Draft, alike: bool
) -> None:
    assert drawn_alike(first, second) == drawn_alike(second, first) == alike
