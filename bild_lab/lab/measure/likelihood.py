"""How likely the target finds a text: a measure of its quality that needs no reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.lab.measure.nan_check import text_logits

ROWS = 1024  # of which the log-softmax is taken at once


@torch.inference_mode()
def log_probability(target: LoadedModel, request: Request, emitted: Sequence[int]) -> float:
    """The sum, in nats, of the log-probabilities that the target gives to the emitted tokens, at temperature 1.

    One forward over prompt and text. Logits processors are left out: it is the model's own distribution.
    """
    if not emitted:
        return 0.0
    logits = text_logits(target, request, emitted)
    chosen = torch.tensor(list(emitted), device=logits.device)
    parts = [
        rows.float().log_softmax(dim=-1).gather(1, own[:, None]).double().sum()
        for rows, own in zip(logits.split(ROWS), chosen.split(ROWS), strict=True)
    ]
    return float(torch.stack(parts).sum())


def log_probabilities(
    target: LoadedModel, requests: Sequence[Request], texts: dict[str, Sequence[Sequence[int]]]
) -> dict[str, list[float]]:
    """Of every method's text of every request. Equal texts are scored once."""
    found: dict[str, list[float]] = {name: [] for name in texts}
    for index, request in enumerate(requests):
        known: dict[tuple[int, ...], float] = {}
        for name, several in texts.items():
            text = tuple(several[index])
            if text not in known:
                known[text] = log_probability(target, request, text)
            found[name].append(known[text])
    return found
