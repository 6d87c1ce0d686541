"""What the decoding loop asks of a model, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bild_lab.engine.draft import Tree
from bild_lab.engine.request import Source


@dataclass(frozen=True)
class Scores:
    """What a forward says of the rows that were fed.

    logits: row i scores what follows the i-th row. final: what the head read there, the last layer's
    output after the final norm. hidden: every layer's output for the rows, where it was asked for.
    """

    logits: Float[Tensor, "m vocab"]
    final: Float[Tensor, "m dim"] | None = None
    hidden: Float[Tensor, "layers m dim"] | None = None


@dataclass(frozen=True)
class Prefix:
    """What only probe rows know: keys and values before the text, and embeddings beyond the vocabulary.

    keys, values: BiTA's prompt, p may be 0. masks: of the token ids from the vocabulary's size on.
    """

    keys: Float[Tensor, "layers heads p dim"]
    values: Float[Tensor, "layers heads p dim"]
    masks: Float[Tensor, "masks dim"] | None = None

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def probe(self, tokens: Int[Tensor, " m"], vocabulary: int) -> Bool[Tensor, " m"] | None:
        """Which of these rows are probes; None where there are no masks to tell by."""
        return None if self.masks is None else tokens >= vocabulary

    def embed(
        self, tokens: Int[Tensor, " m"], vocabulary: int, look_up: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "m dim"]:
        """Rows of the vocabulary's table, which `look_up` reads, and of the masks', chosen on the device."""
        if self.masks is None:
            return look_up(tokens)
        beyond = tokens - vocabulary
        words = look_up(tokens.clamp(max=vocabulary - 1))
        return torch.where((beyond >= 0)[:, None], self.masks[beyond.clamp(min=0)], words)


class Session(Protocol):
    """One sequence in one model. Its last committed token is not cached yet."""

    @property
    def length(self) -> int:
        """How many tokens of the sequence need not be fed again."""

    def extend(
        self,
        tokens: Sequence[int] | Int[Tensor, " m"],
        parents: Tree | Int[Tensor, " m"] | None = None,
        scored: int | None = None,
    ) -> Scores:
        """Run rows after the cached ones.

        parents: parents[i] < i, or -1 for a row that follows the cache; None: a chain. scored: how many
        of the last rows need logits; None: all.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Of the rows of the last `extend`, keep these (in order, root to leaf) and drop the others."""

    def rollback(self, length: int) -> None:
        """Drop every cached row from this position on."""


class Model(Protocol):
    """A model that can start sessions."""

    @property
    def device(self) -> torch.device: ...

    @property
    def engine(self) -> str: ...

    def start(self, source: Source, room: int) -> Session:
        """A session for this source, behind whose prompt about `room` rows will be kept."""


def rows_of(tokens: Sequence[int] | Int[Tensor, " m"], device: torch.device) -> Int[Tensor, " m"]:
    """Token ids on the device; a list travels without waiting for what a GPU is doing."""
    if isinstance(tokens, Tensor) or device.type != "cuda":
        return torch.as_tensor(tokens, dtype=torch.long, device=device)
    return torch.tensor(tokens).pin_memory().to(device, non_blocking=True)
