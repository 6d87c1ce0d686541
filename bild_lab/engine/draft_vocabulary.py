"""Some tokens for a drafter's head (FR-Spec, Zhao et al., 2025): its distribution is zero for all
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

T = TypeVar("T")
MOST = 0.95  # of all tokens: above, a head of its own would save less than it takes


class DraftVocabulary:
    """The tokens that a drafter's head has, in ascending order, and what the engines have made for
    them.
    """

    def __init__(self, tokens: Iterable[int], device: torch.device | str = "cpu") -> None:
        self.tokens: Int[Tensor, " part"] = torch.tensor(sorted(set(tokens)), device=device)
        self._made: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def is_most_of(self, width: int) -> bool:
        """Whether it leaves out so few of so many tokens that the whole head, masked, costs no more
        than a part.
        """
        return len(self) >= MOST * width

    def among(self, others: DraftVocabulary | None) -> DraftVocabulary:
        """The tokens that are among the others too; None: all."""
        if others is None or others is self:
            return self
        return others.made_for(
            self, lambda: DraftVocabulary(set(self.tokens.tolist()) & set(others.tokens.tolist()))
        )

    def made_for(self, owner: object, make: Callable[[], T]) -> T:
        """What this owner makes for these tokens, such as its head's rows of them.

        It is made once.
        """
        if owner not in self._made:
            self._made[owner] = make()
        return self._made[owner]

    def widened(
        self, part: Float[Tensor, "n part"], width: int, others: float
    ) -> Float[Tensor, "n vocab"]:
        """A number for each token of the whole vocabulary: these, and `others` for all other
        tokens.

        part: may be as wide already.
        """
        if part.shape[1] == width:
            return part
        return part.new_full((part.shape[0], width), others).index_copy_(1, self.tokens, part)

    def masked(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """−inf for all other tokens.

        A row in which a processor leaves none of these tokens stays as it is.
        """
        part = logits.index_select(1, self.tokens)
        wide = self.widened(part, logits.shape[1], float("-inf"))
        return torch.where(part.amax(1, keepdim=True) > float("-inf"), wide, logits)
