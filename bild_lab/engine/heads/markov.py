"""A Markov head: a bias on the next token's logits by the token before it, of low rank (DSpark, 2607.05147).

Heads and masks predict tokens further ahead without seeing those between; this tells each candidate its parent.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """The bias before[token] · after^T / √rank. after starts at zero: an untrained head changes nothing."""

    def __init__(self, vocabulary: int, rank: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.before = nn.Parameter(torch.randn(vocabulary, rank, generator=generator))
        self.after = nn.Parameter(torch.zeros(vocabulary, rank))

    def forward(self, tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows vocab"]:
        return self.before[tokens] @ self.after.mT / self.before.shape[1] ** 0.5
