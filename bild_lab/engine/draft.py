"""What a drafter proposes and what an acceptance rule decides about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

Stats = Mapping[str, Any]  # a method's own statistics of a round: flags, numbers, or tuples of numbers

ROOT = -1  # the parent of a node that follows the last committed token


@dataclass(frozen=True)
class Draft:
    """A tree of proposed tokens under the last committed token; a chain is one branch.

    tokens: [n] on the model's device.
    parents: [n], parents[i] < i, or ROOT; None means a chain.
    probs: [n vocab], the distribution each token was sampled from (q of the speculative
        sampling paper); None means that the drafter proposed with certainty.
    calls: how many forwards the drafter ran for it.
    own_probs: [n vocab], the drafter's own distribution, at temperature 1, for a rule that needs it.
    probes: [p], tokens at or beyond the vocabulary's size (BiTA's masks). The target runs them behind the
        others, and the drafter drafts from their scores next time. No rule and no row of the text sees them, and
        none is ever kept.
    shape: how the last committed token, the nodes and the probes stand, for a shape that comes up again; probes
        need it.
    stats: what else the drafter recorded, by name. A tuple has a number for each of its forwards.
    """

    tokens: Int[Tensor, " n"]
    parents: Int[Tensor, " n"] | None = None
    probs: Float[Tensor, "n vocab"] | None = None
    calls: int = 0
    own_probs: Float[Tensor, "n vocab"] | None = None
    probes: Int[Tensor, " p"] | None = None
    shape: Tree | None = None
    stats: Stats = field(default_factory=dict)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def tree(self) -> Tree | None:
        """How the last committed token and the rows below it stand; None for a chain."""
        if self.shape is not None or self.parents is None:
            return self.shape
        return Tree(torch.cat([self.parents.new_full((1,), ROOT), self.parents + 1]))

    def under(self, token: int) -> Int[Tensor, " m"]:
        """Token ids to feed the target: the last committed token, the nodes below it, then probes."""
        last = self.tokens.new_full((1,), token)  # new_tensor would wait for a GPU
        return torch.cat([last, self.tokens] if self.probes is None else [last, self.tokens, self.probes])

    def child(self, node: int, token: int) -> int | None:
        """The node that continues `node` (or ROOT) with `token`, if it was drafted."""
        for index, (drafted, parent) in enumerate(zip(self.token_list, self.parent_list, strict=True)):
            if parent == node and drafted == token:
                return index
        return None

    def to_host(self, *values: Num[Tensor, " _"]) -> list[list[float]]:
        """These vectors as lists. The draft's own come with them, so that a round waits for the device once."""
        own = {"token_list": self.tokens, "parent_list": self.parents}
        own = {name: held for name, held in own.items() if held is not None and name not in self.__dict__}
        parts = [*own.values(), *values]
        exact = torch.cat([part.double() for part in parts]).tolist()  # every token id is exact in float64
        lists = []
        for part in parts:
            lists.append(exact[: part.shape[0]])
            exact = exact[part.shape[0] :]
        for name in own:
            self.__dict__[name] = [int(value) for value in lists.pop(0)]  # of the cached property
        return lists

    @cached_property
    def token_list(self) -> list[int]:
        return self.tokens.tolist()

    @cached_property
    def parent_list(self) -> list[int]:
        return list(range(-1, len(self) - 1)) if self.parents is None else self.parents.tolist()

    @property
    def depth(self) -> int:
        """How many tokens its longest branch has."""
        below: list[int] = []
        for parent in self.parent_list:
            below.append(1 if parent == ROOT else below[parent] + 1)
        return max(below, default=0)


def empty_draft(device: torch.device) -> Draft:
    """No proposal: the target produces the next token alone."""
    return Draft(tokens=torch.empty(0, dtype=torch.long, device=device))


@dataclass(frozen=True)
class Verdict:
    """Which drafted nodes stand, root to leaf, and the target's own token after them.

    stats: what else the rule recorded, by name. A tuple has a number for each drafted token.
    """

    path: tuple[int, ...]
    next_token: int
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True)
class Tree:
    """Rows that stand in a tree. What follows from the shape is computed once.

    parents: [m], parents[i] < i, or ROOT for a row that follows the cache.
    """

    parents: Int[Tensor, " m"]

    @cached_property
    def ancestors(self) -> Bool[Tensor, "m m"]:
        return ancestors(self.parents)

    @cached_property
    def depths(self) -> Int[Tensor, " m"]:
        """How many rows lie above each row: its position relative to the first row of the tree."""
        return self.ancestors.sum(-1) - 1


def ancestors(parents: Int[Tensor, " n"]) -> Bool[Tensor, "n n"]:
    """Which rows each row may attend to: itself and the rows above it in the tree.

    Computed on the device, by jumps of doubling length, so that the host does not wait.
    """
    n = parents.shape[0]
    visible = torch.eye(n + 1, n, dtype=torch.bool, device=parents.device)  # the last row stands above all roots
    visible[n:] = False
    above = torch.cat([torch.where(parents == ROOT, n, parents), parents.new_full((1,), n)])
    for _ in range((n - 1).bit_length()):
        visible = visible | visible[above]
        above = above[above]
    return visible[:n]
