"""The scores that models give to a finished text: checked for NaN, and summed to its log-probability."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.request import Request, Source
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError

ROWS = 256  # of which the log-softmax is taken at once


def require_no_nan(
    models: Iterable[LoadedModel], request: Request, emitted: Sequence[int] = ()
) -> Float[Tensor, "m vocab"]:
    """The first model's scores of a text. Broken weights or overflows fail the point, so that no garbage is stored.

    Every model, such as it decoded, runs once over the prompt and the emitted tokens. Raises UserError, naming the
    checkpoint, if any has NaN among its scores.
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


def log_probability(logits: Float[Tensor, "m vocab"], emitted: Sequence[int]) -> float:
    """How likely a model finds a text: the sum, in nats, of its tokens' log-probabilities at temperature 1.

    logits: after the prompt and after every emitted token except the last, as the model gives them: logits processors
    are left out.
    """
    chosen = torch.tensor(list(emitted), dtype=torch.long, device=logits.device)
    total = 0.0
    for rows, own in zip(logits[: len(chosen)].split(ROWS), chosen.split(ROWS), strict=True):
        total += float(rows.float().log_softmax(dim=-1).gather(1, own[:, None]).double().sum())
    return total


def log_probabilities(
    target: LoadedModel,
    requests: Sequence[Request],
    texts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    known: Sequence[float],
) -> list[float]:
    """What the target gives to a text of every request. Where another text is the same, its value is known."""
    return [
        value if list(text) == list(other) else log_probability(text_logits(target, request, text), text)
        for request, text, other, value in zip(requests, texts, others, known, strict=True)
    ]
