"""How likely the target finds a text: a measure of its quality that needs no reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.lab.measure.nan_check import text_logits

ROWS = 256  # of which the log-softmax is taken at once


def log_probability(logits: Float[Tensor, "m vocab"], emitted: Sequence[int]) -> float:
    """The sum, in nats, of the log-probabilities of the emitted tokens, at temperature 1.

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
    found = []
    for request, text, other, value in zip(requests, texts, others, known, strict=True):
        same = list(text) == list(other)
        found.append(value if same else log_probability(text_logits(target, request, text), text))
    return found
