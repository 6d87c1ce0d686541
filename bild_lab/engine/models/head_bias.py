"""Scores of ids without a token: −inf in every forward, so that a padded model never emits or
drafts one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint


def head_bias(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, " vocab"] | None:
    """What is added to a head's scores: −inf for ids without a token, 0 for all others; None if all
    have one.
    """
    if not checkpoint.unknown:
        return None
    bias = torch.zeros(checkpoint.columns, dtype=dtype)
    bias[list(checkpoint.unknown)] = float("-inf")
    return bias.to(device)


def biased(
    logits: Float[Tensor, "*n vocab"], bias: Float[Tensor, " vocab"] | None
) -> Float[Tensor, "*n vocab"]:
    """The scores with this bias, if there is one."""
    return logits if bias is None else logits + bias
