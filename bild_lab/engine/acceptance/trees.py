"""Which row of the target's logits judges which drafted token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import Draft


def judging_rows(draft: Draft) -> Int[Tensor, " n"]:
    """The row of logits that judges each node: 0 for the root's children, i + 1 for the children of node i."""
    if draft.parents is None:
        return torch.arange(len(draft), device=draft.tokens.device)
    return draft.parents + 1


def judged_nodes(draft: Draft) -> list[list[int]]:
    """The nodes that each row judges, in the order drafted: the root's children for row 0, node i's for row i + 1."""
    nodes: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parent_list):
        nodes[parent + 1].append(node)
    return nodes


def likeliest_path(draft: Draft, scores: Sequence[float], least: float) -> tuple[tuple[int, ...], int]:
    """Accept, from the root down, the child of the highest score, if that is `least` or more.

    scores: of each node, comparable between siblings. Returns the accepted nodes, and the row of logits behind them.
    """
    nodes = judged_nodes(draft)
    path: list[int] = []
    row = 0
    while passing := [node for node in nodes[row] if scores[node] >= least]:
        path.append(max(passing, key=scores.__getitem__))
        row = path[-1] + 1
    return tuple(path), row
