"""A checkpoint's architecture without its weights, for checks before they load."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError


def weightless(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint's architecture on the meta device, without weights, for checks before they
    load.

    Raises UserError for one that Transformers cannot build.
    """
    kind, config = checkpoint.auto_class, copy.deepcopy(checkpoint.config)
    try:
        with torch.device("meta"):
            return kind.from_config(config, dtype=torch.bfloat16)
    except (ValueError, ImportError) as error:
        raise UserError(
            f"transformers cannot build the model of {checkpoint.path}:"
            f" {str(error).strip().splitlines()[0]}; give a checkpoint of a language model"
        ) from error
