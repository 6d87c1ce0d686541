"""Which row of the target's logits judges which drafted token."""

from __future__ import annotations

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
