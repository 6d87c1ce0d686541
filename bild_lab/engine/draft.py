"""What a drafter proposes and what an acceptance rule decides about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from bild_lab.errors import UserError

# statistics of a round, specific to a method: flags, numbers, or tuples of numbers
Stats = Mapping[str, Any]

ROOT = -1  # the parent of a node that follows the last committed token


@dataclass(frozen=True)
class Draft:
    """A tree of proposed tokens after the last committed token; a chain is a tree with one branch.

    tokens: [n] on the model's device.
    parents: [n], parents[i] < i, or ROOT; None means a chain.
    probs: [n vocab], the distribution q that each token was sampled from; None: none was, and q is
        one-hot.
    uniforms: [n] in [0, 1), float64, the random number that picked each token from its row of probs
        (`sampling.pick`), so that a certificate can draw it again; None for tokens that were not
        drawn in this way.
    drawn_from: the model (`session.Model`) whose distribution each token was sampled from, if a
        session of its own can tell.
    calls: how many forwards the drafter ran for this draft.
    unscaled_probs: [n vocab], the drafter's distribution at temperature 1, for a rule that needs
        it.
    probes: [p], token ids: BiTA's masks, at or beyond the vocabulary's size, or the window of
        lookahead decoding. The target runs them after the others, and the drafter makes later
        drafts from their scores. Acceptance rules and text rows do not see them, and they are never
        kept in the cache.
    shape: the tree of the last committed token, the nodes and the probes, to reuse a shape.
        Required with probes.
    stats: what else the drafter recorded, by name. A tuple has one number for each of its forwards.
    known_parents: the parents on the host, from a drafter that has them; else they are read from
        the device.
    """

    tokens: Int[Tensor, " n"]
    parents: Int[Tensor, " n"] | None = None
    probs: Float[Tensor, "n vocab"] | None = None
    calls: int = 0
    unscaled_probs: Float[Tensor, "n vocab"] | None = None
    probes: Int[Tensor, " p"] | None = None
    shape: Tree | None = None
    stats: Stats = field(default_factory=dict)
    uniforms: Float[Tensor, " n"] | None = None
    known_parents: Sequence[int] | None = None
    drawn_from: Any | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def tree(self) -> Tree | None:
        """The tree of the last committed token and the rows below it; None for a chain."""
        if self.shape is not None or self.parents is None:
            return self.shape
        return Tree(torch.cat([self.parents.new_full((1,), ROOT), self.parents + 1]))

    def row_tokens(self, last_token: int) -> Int[Tensor, " m"]:
        """[m] token ids to run the target on: the last committed token, the nodes below it, then
        the probes.
        """
        root = self.tokens.new_full((1,), last_token)  # new_tensor would synchronize with the GPU
        parts = [root, self.tokens]
        if self.probes is not None:
            parts.append(self.probes)
        return torch.cat(parts)

    def up_to_depth(self, depth: int) -> Draft:
        """The draft without the nodes below this depth. One with probes is returned as it is."""
        if self.probes is not None or len(self) <= depth or self.depth <= depth:
            return self
        return self.select(
            [node for node, node_depth in enumerate(self.depths) if node_depth <= depth]
        )

    def select(self, nodes: Sequence[int]) -> Draft:
        """The draft of these nodes alone, in order. With a node its parent must be among them."""
        indices = torch.tensor(nodes, dtype=torch.long, device=self.tokens.device)

        def selected(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, indices.to(tensor.device))

        parents = self.parents
        if parents is not None:
            new_index = {node: index for index, node in enumerate(nodes)}
            parents = parents.new_tensor(
                [new_index.get(self.parent_list[node], ROOT) for node in nodes]
            )
        return replace(
            self,
            tokens=selected(self.tokens),
            parents=parents,
            probs=selected(self.probs),
            unscaled_probs=selected(self.unscaled_probs),
            uniforms=selected(self.uniforms),
            shape=None,
            known_parents=None,
        )

    def to_host(self, *values: Num[Tensor, " _"]) -> list[list[float]]:
        """These vectors as lists.

        Tokens and parents are copied along, so a round waits for the device only once.
        """
        # what is still on the device, by the cached property that will hold the list
        unread: dict[str, Tensor] = {}
        if "token_list" not in self.__dict__:
            unread["token_list"] = self.tokens
        parents_on_device = self.parents is not None and self.known_parents is None
        if parents_on_device and "parent_list" not in self.__dict__:
            unread["parent_list"] = self.parents
        vectors = [*unread.values(), *values]
        # every token id is exact in float64
        numbers = iter(torch.cat([vector.double() for vector in vectors]).tolist())
        lists = [list(islice(numbers, vector.shape[0])) for vector in vectors]
        for name in unread:
            self.__dict__[name] = [int(number) for number in lists.pop(0)]
        return lists

    @cached_property
    def token_list(self) -> list[int]:
        return self.tokens.tolist() if len(self) else []

    @cached_property
    def parent_list(self) -> list[int]:
        if self.parents is None:
            return list(range(-1, len(self) - 1))
        return self.parents.tolist() if self.known_parents is None else list(self.known_parents)

    @property
    def depths(self) -> list[int]:
        """Each node's place in its branch, from 1."""
        depths: list[int] = []
        for parent in self.parent_list:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """The length of the longest branch."""
        return max(self.depths, default=0)


def empty_draft(device: torch.device) -> Draft:
    """No proposal: the target produces the next token alone."""
    return Draft(tokens=torch.empty(0, dtype=torch.long, device=device))


def common_prefix(first_tokens: Sequence[int], second_tokens: Sequence[int]) -> int:
    """The length of the common prefix."""
    length = 0
    for first_token, second_token in zip(first_tokens, second_tokens, strict=False):
        if first_token != second_token:
            break
        length += 1
    return length


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes, root to leaf, and the target's own token after them.

    stats: what else the rule recorded, by name. A tuple has one number for each drafted token.
    """

    path: tuple[int, ...]
    next_token: int
    stats: Stats = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """The rows of the target's forward that stay: the last committed token's, which is row 0,
        and those of the accepted nodes, of which node i is row i + 1.
        """
        return [0, *(node + 1 for node in self.path)]

    def tokens(self, draft: Draft) -> list[int]:
        """What the round gives to the text: the accepted tokens, then the target's own."""
        return [*(draft.token_list[node] for node in self.path), self.next_token]

    def __post_init__(self) -> None:
        """Raises UserError for a path that lists no nodes, and for a token that is no number."""
        if type(self.path) is not tuple:
            try:
                object.__setattr__(self, "path", tuple(int(node) for node in self.path))
            except (TypeError, ValueError, OverflowError) as error:
                raise UserError(
                    "the path of a verdict lists the accepted nodes, such as"
                    f" tuple(range(accepted)), got {self.path!r}"
                ) from error
        if type(self.next_token) is not int:  # a tensor is never among the end tokens
            try:
                object.__setattr__(self, "next_token", int(self.next_token))
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise UserError(
                    f"the next_token of a verdict is one token id, got {self.next_token!r}"
                ) from error


def misplaced_node(parents: Sequence[int]) -> int | None:
    """The first node whose parent is no node before it; None without one."""
    return next((node for node, parent in enumerate(parents) if not ROOT <= parent < node), None)


@dataclass(frozen=True)
class Tree:
    """The shape of a tree of rows. Masks and depths are computed once.

    parents: [m], parents[i] < i, or ROOT for a row that directly follows the cached rows. Raises
    UserError for others, which an engine would follow for ever; those on an accelerator are not read.
    """

    parents: Int[Tensor, " m"]

    def __post_init__(self) -> None:
        if self.parents.device.type != "cpu":
            return
        if (row := misplaced_node(parents := self.parents.tolist())) is not None:
            raise UserError(
                f"row {row} of a tree has the parent {parents[row]}; a parent is an earlier row, from"
                f" 0 on, or {ROOT} for a row that follows the cached ones"
            )

    def __len__(self) -> int:
        return self.parents.shape[0]

    @cached_property
    def ancestors(self) -> Bool[Tensor, "m m"]:
        return ancestors(self.parents)

    @cached_property
    def depths(self) -> Int[Tensor, " m"]:
        """How many ancestors each row has: its position relative to the tree's first row."""
        return self.ancestors.sum(-1) - 1


def ancestors(parents: Int[Tensor, " n"]) -> Bool[Tensor, "n n"]:
    """Which rows each row may attend to: itself and its ancestors in the tree."""
    if parents.device.type != "cpu":
        return ancestors_by_doubling(parents)
    n = parents.shape[0]
    visible = np.zeros((n, n), dtype=bool)
    for row, parent in enumerate(parents.tolist()):
        if parent != ROOT:
            visible[row] = visible[parent]
        visible[row, row] = True
    return torch.from_numpy(visible)


def ancestors_by_doubling(parents: Int[Tensor, " n"]) -> Bool[Tensor, "n n"]:
    """`ancestors` on an accelerator, without waiting for it: each step doubles the depth that is
    known.
    """
    n = parents.shape[0]
    # row n: the parent of all roots
    visible = torch.eye(n + 1, n, dtype=torch.bool, device=parents.device)
    visible[n:] = False
    jumps = torch.cat([torch.where(parents == ROOT, n, parents), parents.new_full((1,), n)])
    for _ in range((n - 1).bit_length()):
        visible = visible | visible[jumps]
        jumps = jumps[jumps]
    return visible[:n]
