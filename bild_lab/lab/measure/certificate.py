"""Certificates of losslessness: what one says of a text, and how many texts have each verdict.

`greedy_certificate` compares a text with the target's own, `sampled_certificate` judges output
distributions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bild_lab.engine.models.hf.admission import tolerance
from bild_lab.engine.session import LoadedModel
from bild_lab.lab.schema.numbers import CertificateCounts

# verdicts on greedy texts, and on sampled ones
EQUAL, TIE, DEFECT = "equal", "numerical tie", "defect"
EXACT, ROUNDING, NO_FORM = "exact", "rounding", "no closed form"
NO_TEXT = "no text"  # another engine failed to give one
SESSION_DEFECT = "defect of the model's session"
# a tie may span this many times the numerical noise, and noise this many times the roundings of all
# layers
SLACK = 4


@dataclass(frozen=True)
class Certificate:
    """One example's verdict."""

    verdict: str
    # of the first token that differs, or of the first context with a defect; None if there is none
    position: int | None = None

    # Of a greedy text that differs:

    # the method's and the target's own token there, None for a text that has ended
    token: int | None = None
    target_token: int | None = None
    # how much lower the target scores the method's token than its own, one row after another, in nats
    gap: float | None = None
    margin: float | None = None  # between the target's two most likely tokens there, in nats
    # how much the target's scores of the two tokens change with the number of rows, in nats; at
    # least their rounding error
    noise: float | None = None
    rows: int | None = None  # how many ran in the forward that verified the position
    # the gap when the text is scored anew with so many rows; below 0, the number of rows alone
    # explains the token
    wide_gap: float | None = None

    # Of a sampled text:

    check: str | None = None  # which one found a defect
    contexts: int | None = None  # how many were judged
    # the largest total variation between what the rule emits and the target's distribution; None
    # if the rule has no closed form
    output: float | None = None
    # by number of rows, the largest such distance of the target's own distribution from that of
    # one row after another
    rounding: Mapping[int, float] = field(default_factory=dict)
    # of the emitted tokens from what the rule declares (`declared`)
    deviations: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def most_noise(model: LoadedModel) -> float:
    """The most that the number of rows changes a score of this model by rounding, relative to the
    largest score. Our kernels sum every row alike, so no more than in float32.
    """
    return tolerance(torch.float32) if model.engine == "kernels" else noise_of_layers(model)


def noise_of_layers(model: LoadedModel) -> float:
    """The most that rounding changes a score of a model in this precision, relative to the largest
    one: two sums per layer, with random signs, a few times over.

    At least the difference that a model's sessions are admitted with.
    """
    sums = SLACK * torch.finfo(model.dtype).eps * (2 * model.depth) ** 0.5
    return max(tolerance(torch.float32), sums)


def largest_by_rows(distances: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The largest of these distances for each number of rows, few rows first."""
    largest: dict[int, float] = {}
    for rows, distance in distances:
        largest[rows] = max(distance, largest.get(rows, 0.0))
    return dict(sorted(largest.items()))


def count_verdicts(certificates: Sequence[Certificate], claimed: bool) -> CertificateCounts:
    """How many examples have each verdict. claimed: whether the method says that it is lossless."""
    verdicts = Counter(certificate.verdict for certificate in certificates)
    outputs = [certificate.output for certificate in certificates if certificate.output is not None]
    rounding = largest_by_rows(
        pair for certificate in certificates for pair in certificate.rounding.items()
    )
    sampled = any(certificate.contexts for certificate in certificates)
    unjudged = verdicts[NO_FORM] + verdicts[NO_TEXT]
    return CertificateCounts(
        equal=verdicts[EQUAL] + verdicts[EXACT],
        ties=verdicts[TIE] + verdicts[ROUNDING],
        defects=verdicts[DEFECT] + verdicts[SESSION_DEFECT],
        unjudged=unjudged if sampled or unjudged else None,
        output=max(outputs) if outputs else None,
        rounding={str(rows): distance for rows, distance in rounding.items()} or None,
        claimed=claimed,
    )
