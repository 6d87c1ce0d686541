"""Attention masks of trees, made by the model's own mask functions.

A module of Transformers builds its masks, one for each kind of layer, by functions of a row's and a key's position in
the cache. In a tree two rows may have the same position. While a plan has `Branches`, these functions are called with
positions in the text instead, so that windows and chunks are counted along a row's own branch, and a row then sees
its own ancestors only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

BY_BRANCH = ("eager", "sdpa")  # kinds of attention that take a mask of any shape


@dataclass(frozen=True)
class Branches:
    """The tree of a forward's rows, which start at cache slot `start`.

    visible: which slots each row may attend to at all. positions: of the rows in their texts. keys: of the slots; those
    of a prefix are negative, and in no window.
    """

    start: int
    visible: Bool[Tensor, "m n"]
    positions: Int[Tensor, " m"]
    keys: Int[Tensor, " n"]

    def mask(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The model's mask function (batch, head, row's slot, key's slot), along the branches."""

        def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            position = self.keys[key]
            near = own(batch, head, self.positions[row - self.start], position) | (position < 0)
            return near & self.visible[row - self.start, key]

        return visible


def follow_branches(current: Callable[[], Branches | None]) -> None:
    """Have the masks of Transformers follow these branches; while there are none, they are as shipped."""
    for name in BY_BRANCH:
        if not hasattr(made := ALL_MASK_ATTENTION_FUNCTIONS[name], "_follows_branches"):
            ALL_MASK_ATTENTION_FUNCTIONS[name] = _following_branches(made, current)


def _following_branches(make: Callable[..., Any], current: Callable[[], Branches | None]) -> Callable[..., Any]:
    @wraps(make)
    def mask(*args: Any, mask_function: Callable[..., Tensor] | None = None, **options: Any) -> Any:
        branches = current()
        if branches is None or mask_function is None:
            given = {} if mask_function is None else {"mask_function": mask_function}
            return make(*args, **given, **options)
        return make(*args, mask_function=branches.mask(mask_function), **{**options, "allow_is_causal_skip": False})

    mask._follows_branches = True
    return mask
