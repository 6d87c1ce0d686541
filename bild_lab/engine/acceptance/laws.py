"""What a rule emits, as a distribution: accepted and replaced tokens added up in closed form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bild_lab.engine.acceptance.trees import judged_nodes
from bild_lab.engine.draft import Draft

# Of the distribution that a draft stands against, and a node: the probability that each token is accepted if it is
# the one drafted there, and the distribution that stands against the next sibling, or that the token is drawn from.
Judge = Callable[[Float[Tensor, " vocab"], int], tuple[Float[Tensor, " vocab"], Float[Tensor, " vocab"]]]


def law_of(
    draft: Draft, p: Float[Tensor, "n+1 vocab"], drawn: Float[Tensor, "n vocab"], judge: Judge
) -> Float[Tensor, "n+1 vocab"]:
    """The distribution of the token emitted behind each row, for a rule that tries the children of a row in order.

    With the accepting probability a and the rest r of a child drawn from d, what is emitted from this child on is
    d·a + (1 − Σ d·a)·r, and r is what is emitted from the next child on. drawn: d of each node, given the siblings
    before it.
    """
    laws = p.clone()
    for row, children in enumerate(judged_nodes(draft)):
        rest, kept = p[row], []
        for node in children:
            accepted, rest = judge(rest, node)
            kept.append(drawn[node] * accepted)
        for part in reversed(kept):
            rest = part + (1 - part.sum()) * rest
        laws[row] = rest
    return laws


def passing_law(
    draft: Draft, p: Float[Tensor, "n+1 vocab"], drawn: Float[Tensor, "n vocab"], passes: Bool[Tensor, "n+1 vocab"]
) -> Float[Tensor, "n+1 vocab"] | None:
    """The law of a rule that keeps tokens by a bar, and else draws from p itself. In a tree siblings compete: None.

    passes: whether each token behind each row passes the bar.
    """
    if draft.parents is not None:
        return None
    return law_of(draft, p, drawn, lambda owed, node: (passes[node].to(p), owed))


def acceptance(p: Float[Tensor, "*n vocab"], q: Float[Tensor, "*n vocab"]) -> Float[Tensor, "*n vocab"]:
    """min(1, p / q): how likely each token is accepted by a uniform number u with u·q < p."""
    return torch.where(q > 0, (p / q).clamp(max=1.0), (p > 0).to(p))
