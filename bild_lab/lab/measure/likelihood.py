"""How likely the target finds the texts of a point, and whether its scores are numbers at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.models.device import dtype_name
from bild_lab.engine.request import Request, Source
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import StageTrace
from bild_lab.errors import UserError
from bild_lab.lab.measure.timing import Timed

MOST_ROWS = 256  # of scores, whose log-softmax is taken at once
_without_nan: set[tuple[str, ...]] = set()  # models of this process that have scored a prompt


def require_no_nan(models: Iterable[LoadedModel], request: Request) -> None:
    """Run every model, such as it decodes, over a prompt, unless it has run over one in this
    process.

    Raises UserError, naming the checkpoint, for scores of NaN: broken weights or overflows.
    """
    for model in models:
        key = (model.checkpoint.fingerprint, model.engine, str(model.dtype), str(model.device))
        if key not in _without_nan:
            _require_number(model, nan=bool(text_logits(model, request, ()).isnan().any()))
            _without_nan.add(key)


def _require_number(model: LoadedModel, nan: bool) -> None:
    if nan:
        dtype = dtype_name(model.dtype)
        raise UserError(
            f"the checkpoint {model.checkpoint.path} scores a text with NaN in {dtype}: its weights"
            " are broken or its numbers overflow; set runtime.dtype=float32 or give another"
            " checkpoint"
        )


@torch.inference_mode()
def text_logits(
    model: LoadedModel, request: Request, emitted: Sequence[int]
) -> Float[Tensor, "m vocab"]:
    """The scores after the prompt and after every emitted token except the last, in one forward."""
    source = request.source
    # a prompt is never compiled
    text = Source((*source.prompt, *emitted[:-1]), source.encoder_ids, source.device)
    return model.text_logits(text, max(1, len(emitted)))


def log_probability(logits: Float[Tensor, "m vocab"], emitted: Sequence[int]) -> float:
    """How likely a model finds a text: the sum, in nats, of its tokens' log-probabilities at
    temperature 1.

    logits: after the prompt and after every emitted token except the last, as the model gives them:
    logits processors are left out.
    """
    token_ids = torch.tensor(list(emitted), dtype=torch.long, device=logits.device)
    sum_of_logs = 0.0
    chunks = zip(logits[: len(token_ids)].split(MOST_ROWS), token_ids.split(MOST_ROWS), strict=True)
    for rows, row_tokens in chunks:
        log_probs = rows.float().log_softmax(dim=-1)
        sum_of_logs += float(log_probs.gather(1, row_tokens[:, None]).double().sum())
    return sum_of_logs


def log_probabilities(
    target: LoadedModel, requests: Sequence[Request], timed: Mapping[str, Sequence[Timed]]
) -> dict[str, list[float]]:
    """What the target gives to the texts of each method, in nats.

    A text whose every token was scored by timed rounds has its value from there, and equal texts
    have one. Any other takes a forward. Raises UserError for NaN: such a text is garbage.
    """
    nats: dict[str, list[float]] = {name: [] for name in timed}
    for index, request in enumerate(requests):
        nats_by_text: dict[tuple[int, ...], float] = {}
        for name in sorted(timed):  # the baseline's rounds have the target's own rows
            text, trace = tuple(timed[name][index].token_ids), timed[name][index].trace
            if text not in nats_by_text:
                if isinstance(trace, StageTrace) and trace.scored == len(text):
                    nats_by_text[text] = trace.log_probability
                else:
                    logits = text_logits(target, request, text)
                    nats_by_text[text] = log_probability(logits, text)
            _require_number(target, nan=math.isnan(nats_by_text[text]))
            nats[name].append(nats_by_text[text])
    return nats
