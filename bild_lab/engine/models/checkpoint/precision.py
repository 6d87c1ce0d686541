"""The precision in which a model decodes where none is named: `runtime.dtype=auto`."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.device import DTYPES
from bild_lab.errors import require_choice

AUTO = "auto"
LARGE = 2_000_000_000  # parameters, 8 GB in float32: from there on auto halves them on a GPU


def resolve_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The precision with this name. `auto`: on a CPU float32; on a GPU that in which the checkpoint
    is stored.

    A checkpoint in float32 of `LARGE` parameters or more is decoded in bfloat16 on a GPU. Reads no
    weights. Raises UserError for an unknown name.
    """
    require_choice("runtime.dtype", name, (AUTO, *DTYPES))
    if name != AUTO:
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    if (stored := stored_dtype(checkpoint.config)) in (torch.bfloat16, torch.float16):
        return stored
    return torch.bfloat16 if parameters(checkpoint) >= LARGE else torch.float32


def stored_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """The precision of the weights, as a config.json says; None if it does not."""
    stated = config.get_text_config(decoder=True).dtype or config.dtype
    return getattr(torch, stated, None) if isinstance(stated, str) else stated


def parameters(checkpoint: Checkpoint) -> int:
    """How many numbers a model has, of its configuration alone."""
    return sum(weight.numel() for weight in checkpoint.weightless().parameters())
