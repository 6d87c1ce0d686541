"""The tokens of a drafter's head (FR-Spec, Zhao et al., 2025). Its distribution is zero for all
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

Cached = TypeVar("Cached")
# the share of all tokens above which a head of its own would save less than it takes
MAX_SHARE = 0.95


class DraftVocabulary:
    """The tokens that a drafter's head has, in ascending order, and what the engines have made for
    them.
    """

    def __init__(self, tokens: Iterable[int], device: torch.device | str = "cpu") -> None:
        self.tokens: Int[Tensor, " tokens"] = torch.tensor(sorted(set(tokens)), device=device)
        self._cache: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def covers_most_of(self, vocabulary_size: int) -> bool:
        """Whether the whole head, masked, costs no more than a head of these tokens."""
        return len(self) >= MAX_SHARE * vocabulary_size

    def intersection(self, other_vocabulary: DraftVocabulary | None) -> DraftVocabulary:
        """The tokens that both vocabularies have. None stands for all tokens."""
        if other_vocabulary is None or other_vocabulary is self:
            return self

        def common_tokens() -> DraftVocabulary:
            return DraftVocabulary(
                set(self.tokens.tolist()) & set(other_vocabulary.tokens.tolist())
            )

        return other_vocabulary.cached_for(self, common_tokens)

    def cached_for(self, owner: object, make: Callable[[], Cached]) -> Cached:
        """What this owner makes for these tokens, such as its head's rows of them.

        It is made once.
        """
        if owner not in self._cache:
            self._cache[owner] = make()
        return self._cache[owner]

    def widened(
        self, values: Float[Tensor, "n tokens"], width: int, default: float
    ) -> Float[Tensor, "n vocab"]:
        """A number for each token of the whole vocabulary: these values, and `default` for all
        other tokens.

        values: may be as wide already.
        """
        if values.shape[1] == width:
            return values
        return values.new_full((values.shape[0], width), default).index_copy_(
            1, self.tokens, values
        )

    def bias(self, width: int) -> Float[Tensor, " vocab"]:
        """What the whole head adds to its scores so that these tokens alone have one: −inf for all
        others.
        """
        zeros = torch.zeros(1, len(self), dtype=torch.float32, device=self.tokens.device)
        return self.widened(zeros, width, float("-inf"))[0]

    def masked(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """The logits with −inf for all other tokens.

        A row in which a processor leaves none of these tokens stays as it is.
        """
        vocabulary_logits = logits.index_select(1, self.tokens)
        wide = self.widened(vocabulary_logits, logits.shape[1], float("-inf"))
        return torch.where(vocabulary_logits.amax(1, keepdim=True) > float("-inf"), wide, logits)
