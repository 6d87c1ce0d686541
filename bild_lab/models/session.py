"""What the decoding loop asks of a model, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.request import Source


@dataclass(frozen=True)
class Scores:
    """What a forward says of the rows that were fed.

    logits: row i scores what follows the i-th row. hidden: every layer's output for the rows, where
    it was asked for.
    """

    logits: Float[Tensor, "m vocab"]
    hidden: Float[Tensor, "layers m dim"] | None = None


class Session(Protocol):
    """One sequence in one model. Its last committed token is not cached yet."""

    @property
    def length(self) -> int:
        """How many tokens of the sequence need not be fed again."""

    def extend(
        self,
        tokens: Sequence[int] | Int[Tensor, " m"],
        parents: Int[Tensor, " m"] | None = None,
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
