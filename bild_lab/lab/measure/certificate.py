"""A certificate of losslessness: where a method's text first differs from the target's, and whether it is a tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.models.admission import tolerance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LAST, LoadedModel
from bild_lab.lab.schema.result import CertificateCounts

EQUAL, TIE, DEFECT = "equal", "numerical tie", "defect"
SESSION_DEFECT = "defect of the model's session"
SLACK = 4  # a tie may span this many times the numerical noise, and noise this many times the roundings of all layers


@dataclass(frozen=True)
class Certificate:
    """One example's verdict.

    position: of the first token that differs, None if no token differs.
    token, target_token: the method's and the target's own token there, None for a text that has ended.
    gap: how much lower the target scores the method's token than its own, in nats.
    margin: between the target's two likeliest tokens there, in nats.
    noise: how much the target's scores of the two tokens change if the text runs in one forward instead of token by
    token, in nats; at least their rounding error.
    """

    verdict: str
    position: int | None = None
    token: int | None = None
    target_token: int | None = None
    gap: float | None = None
    margin: float | None = None
    noise: float | None = None


@torch.inference_mode()
def certify(target: LoadedModel, request: Request, tokens: Sequence[int], own: Sequence[int]) -> Certificate:
    """Compare emitted tokens with the target's own. Both are decoded greedily.

    A difference is a numerical tie if the target scores both tokens the same, within a few times its numerical noise.
    Otherwise it is a defect. A method that changes outputs on purpose has defects too. Scores that change by more than
    rounding can explain are a defect of the model's session, which runs rows together and one by one.
    """
    if list(tokens) == list(own):
        return Certificate(EQUAL)
    shared = zip(tokens, own, strict=False)
    position = next((at for at, (one, other) in enumerate(shared) if one != other), min(len(tokens), len(own)))
    token, target_token = (text[position] if position < len(text) else None for text in (tokens, own))
    if token is None or target_token is None:  # one text continues after the other has ended
        return Certificate(DEFECT, position, token, target_token)
    at_once, one_by_one = (scores(target, request, own[:position], step) for step in (len(own), 1))
    pair = torch.tensor([token, target_token], device=at_once.device)
    if not bool(one_by_one[pair].isfinite().all()):  # a processor forbids the token
        return Certificate(DEFECT, position, token, target_token)
    rounding = torch.finfo(target.dtype).eps * float(at_once[pair].abs().max())
    noise = max(rounding, float((at_once - one_by_one)[pair].abs().max()))
    gap = float(one_by_one[target_token] - one_by_one[token])
    best, second = one_by_one.topk(2).values.tolist()
    tied = best - float(one_by_one[pair].min()) <= SLACK * noise
    both = torch.stack([at_once, one_by_one])
    largest = float(both[both.isfinite()].abs().max())
    verdict = TIE if tied else DEFECT
    if not noise <= most_noise(target.dtype, target.depth) * largest:
        verdict = SESSION_DEFECT
    return Certificate(verdict, position, token, target_token, gap, best - second, noise)


def most_noise(dtype: torch.dtype, depth: int) -> float:
    """The most that rounding changes a score, relative to the largest one: two sums per layer, with random signs.

    At least the difference that a model's sessions are admitted with.
    """
    return max(tolerance(torch.float32), SLACK * torch.finfo(dtype).eps * (2 * depth) ** 0.5)


def scores(target: LoadedModel, request: Request, emitted: Sequence[int], step: int) -> Float[Tensor, " vocab"]:
    """The target's logits after the prompt and these tokens, run `step` tokens at a time."""
    session = target.start(request.source, request.limits.max_new_tokens)
    fed = [request.source.prompt[-1], *emitted]
    for start in range(0, len(fed), step):
        logits = session.extend(fed[start : start + step], LAST).logits
    return precise(logits[0])


def count_verdicts(certificates: Sequence[Certificate]) -> CertificateCounts:
    """How many examples have each verdict."""
    verdicts = [each.verdict for each in certificates]
    return CertificateCounts(
        equal=verdicts.count(EQUAL),
        ties=verdicts.count(TIE),
        defects=verdicts.count(DEFECT) + verdicts.count(SESSION_DEFECT),
    )
