"""Whether a model's scores are NaN. Broken or overflowing weights then end the point, and no garbage is stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.models.hf import HuggingFaceModel, HuggingFaceSession
from bild_lab.engine.models.native.model import NativeModel, NativeSession
from bild_lab.engine.request import Request
from bild_lab.errors import UserError


def require_no_nan(
    models: Iterable[HuggingFaceModel], engine: str, request: Request, emitted: Sequence[int] = ()
) -> None:
    """Raise UserError, naming the checkpoint, if a model scores a text with NaN.

    Every model runs once over the prompt and the emitted tokens. engine: native or hf, the one that decoded.
    """
    for model in models:
        if bool(text_logits(model, engine, request, emitted).isnan().any()):
            dtype = str(model.dtype).removeprefix("torch.")
            raise UserError(
                f"the checkpoint {model.checkpoint.path} scores a text with NaN in {dtype}: its weights are broken "
                "or its numbers overflow; set runtime.dtype=float32 or give another checkpoint"
            )


@torch.inference_mode()
def text_logits(
    model: HuggingFaceModel, engine: str, request: Request, emitted: Sequence[int]
) -> Float[Tensor, "m vocab"]:
    """The scores after the prompt and after every emitted token except the last, in one forward."""
    source = request.source
    if engine == "native" and isinstance(model, NativeModel):
        # not `start`: it would compile a step for a text of this length
        session = NativeSession(model.decoder, source, len(emitted) + 1)
    else:
        session = HuggingFaceSession(model.module, source)
    return session.extend([source.prompt[-1], *emitted[:-1]]).logits
