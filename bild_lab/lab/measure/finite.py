"""Whether models give numbers at all: broken or overflowing weights end a point instead of filling it with garbage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.request import Request, Source
from bild_lab.engine.session import LoadedModel, Want
from bild_lab.errors import UserError


def require_numbers(models: Iterable[LoadedModel], engine: str, request: Request, emitted: Sequence[int] = ()) -> None:
    """Raise UserError, naming the checkpoint, where a model scores a text with NaN.

    Every model runs once over the prompt and what was emitted behind it; engine: what decoded, native or hf.
    """
    for model in models:
        if bool(text_logits(model, engine, request, emitted).isnan().any()):
            dtype = str(model.dtype).removeprefix("torch.")
            raise UserError(
                f"the checkpoint {model.checkpoint.path} scores a text with NaN in {dtype}: its weights are broken "
                "or its numbers overflow; set runtime.dtype=float32 or give another checkpoint"
            )


@torch.inference_mode()
def text_logits(model: LoadedModel, engine: str, request: Request, emitted: Sequence[int]) -> Float[Tensor, "m vocab"]:
    """The scores behind the prompt and behind every emitted token but the last, in one forward."""
    ran = model if engine == model.engine else model.transformers
    source = request.source
    text = Source((*source.prompt, *emitted[:-1]), source.encoder_ids, source.device)  # a prompt is never compiled
    logits = ran.start(text, 1).extend([text.prompt[-1]], Want(prompt=True)).logits
    return logits[len(source.prompt) - 1 :]
