"""Checks a model's scores for NaN. Broken weights or overflows then fail the point, and no garbage is stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.request import Request, Source
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError


def require_no_nan(
    models: Iterable[LoadedModel], request: Request, emitted: Sequence[int] = ()
) -> Float[Tensor, "m vocab"]:
    """The first model's scores of a text; raises UserError, naming the checkpoint, if any model has NaN among its own.

    Every model, such as it decoded, runs once over the prompt and the emitted tokens.
    """
    first: Float[Tensor, "m vocab"] | None = None
    for model in models:
        logits = text_logits(model, request, emitted)
        first = logits if first is None else first
        if bool(logits.isnan().any()):
            dtype = str(model.dtype).removeprefix("torch.")
            raise UserError(
                f"the checkpoint {model.checkpoint.path} scores a text with NaN in {dtype}: its weights are broken "
                "or its numbers overflow; set runtime.dtype=float32 or give another checkpoint"
            )
    return first


@torch.inference_mode()
def text_logits(model: LoadedModel, request: Request, emitted: Sequence[int]) -> Float[Tensor, "m vocab"]:
    """The scores after the prompt and after every emitted token except the last, in one forward."""
    source = request.source
    text = Source((*source.prompt, *emitted[:-1]), source.encoder_ids, source.device)  # a prompt is never compiled
    # a model of another vocabulary has another number of rows
    return model.text_logits(text)[-max(1, len(emitted)) :]
