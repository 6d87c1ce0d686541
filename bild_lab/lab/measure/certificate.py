"""A certificate of losslessness: where a greedy text first differs from the target's own, and whether it is a tie.

`sampled_certificate.py` certifies sampled texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Tree, Verdict
from bild_lab.engine.models.admission import tolerance
from bild_lab.engine.protocols import Acceptance, Method
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LAST, Feed, LoadedModel, Rows
from bild_lab.lab.measure.witness import OneRow, largest, visited, witnessed
from bild_lab.lab.schema.numbers import CertificateCounts

EQUAL, TIE, DEFECT = "equal", "numerical tie", "defect"
EXACT, ROUNDING, NO_LAW = "exact", "rounding", "no closed form"  # of sampled texts
SESSION_DEFECT = "defect of the model's session"
SLACK = 4  # a tie may span this many times the numerical noise, and noise this many times the roundings of all layers


@dataclass(frozen=True)
class Certificate:
    """One example's verdict.

    position: of the first token that differs, or of the first context with a defect; None if there is none.

    Of a greedy text that differs: token, target_token: the method's and the target's own token there, None for a text
    that has ended. gap: how much lower the target scores the method's token than its own, one row after another, in
    nats. margin: between the target's two likeliest tokens there, in nats. rows: how many rows ran in the forward that
    verified the position, and wide_gap: the gap when the text is scored anew with so many rows; below 0, the number of
    rows alone explains the token. noise: how much the target's scores of the two tokens change with the number of
    rows, in nats; at least their rounding error.

    Of a sampled text: check: which check found a defect. contexts: how many were judged. law: the largest total
    variation between what the rule emits and the target's distribution; None if the rule has no closed form. rounding:
    by number of rows, the largest total variation between the target's distribution in such a forward and one row
    after another.
    """

    verdict: str
    position: int | None = None
    token: int | None = None
    target_token: int | None = None
    gap: float | None = None
    margin: float | None = None
    noise: float | None = None
    rows: int | None = None
    wide_gap: float | None = None
    check: str | None = None
    contexts: int | None = None
    law: float | None = None
    rounding: Mapping[int, float] = field(default_factory=dict)


@torch.inference_mode()
def certify(
    target: LoadedModel, request: Request, tokens: Sequence[int], own: Sequence[int], method: Method | None = None
) -> Certificate:
    """Compare emitted tokens with the target's own. Both are decoded greedily.

    A difference is a numerical tie if the target scores both tokens the same, within a few times its numerical noise.
    Otherwise it is a defect. A method that changes outputs on purpose has defects too. Scores that change by more than
    rounding can explain are a defect of the model's session, which runs rows together and one by one.

    method: what decoded the tokens. If it verifies drafts, the text is scored with the rows of its own verification;
    else in one forward.
    """
    if list(tokens) == list(own):
        return Certificate(EQUAL)
    shared = zip(tokens, own, strict=False)
    position = next((at for at, (one, other) in enumerate(shared) if one != other), min(len(tokens), len(own)))
    token, target_token = (text[position] if position < len(text) else None for text in (tokens, own))
    if token is None or target_token is None:  # one text continues after the other has ended
        return Certificate(DEFECT, position, token, target_token)
    one_by_one = OneRow(target, request).behind([*request.source.prompt, *own[:position]])
    wide = verification(target, request, own[:position], method)
    pair = torch.tensor([token, target_token], device=one_by_one.device)
    if not bool(one_by_one[pair].isfinite().all()):  # a processor forbids the token
        return Certificate(DEFECT, position, token, target_token)
    rounding = torch.finfo(target.dtype).eps * float(one_by_one[pair].abs().max())
    changes = torch.stack([(logits - one_by_one)[pair] for logits in wide.logits]).abs()
    noise = float(changes.max().clamp(min=rounding))  # NaN stays, which `max` of numbers may drop
    gap, wide_gap = (float(logits[target_token] - logits[token]) for logits in (one_by_one, wide.logits[0]))
    best, second = one_by_one.topk(2).values.tolist()
    verdict = TIE if best - float(one_by_one[pair].min()) <= SLACK * noise else DEFECT
    if not noise <= most_noise(target.dtype, target.depth) * largest([one_by_one, *wide.logits]):
        verdict = SESSION_DEFECT
    return Certificate(verdict, position, token, target_token, gap, best - second, noise, wide.rows, wide_gap)


@dataclass(frozen=True)
class Verification:
    """The target's logits in one context, with several rows at once. rows: how many.

    logits: scored anew, then, if they are known, those that the rule read.
    """

    rows: int
    logits: tuple[Float[Tensor, " vocab"], ...]


def verification(target: LoadedModel, request: Request, emitted: Sequence[int], method: Method | None) -> Verification:
    """Score the context behind these tokens with the rows of the round that verified it, else in one forward."""
    found: list[tuple[list[int], Draft, int, Float[Tensor, " vocab"]]] = []

    def see(
        text: list[int], rule: Acceptance, draft: Draft, logits: Float[Tensor, "n+1 vocab"], verdict: Verdict
    ) -> None:
        for position, row in visited(text, verdict, request):
            if position == len(emitted):
                found.append((text, draft, row, precise(logits[row]).clone()))

    if isinstance(method, DraftThenVerify) and method.feeds > Feed.ROWS:
        witnessed(method, request, see)
    prompt = list(request.source.prompt)
    if not found:
        text = [*prompt, *emitted]
        session = target.start(request.source, request.limits.max_new_tokens)
        rows = text[len(prompt) - 1 :]
        return Verification(len(rows), (precise(session.extend(rows, LAST).logits[0]),))
    text, draft, row, used = found[0]
    session = target.start(request.source, request.limits.max_new_tokens)
    for token in text[len(prompt) - 1 : -1]:
        session.extend([token])
    tree = None if draft.parents is None else Tree(torch.cat([draft.parents.new_full((1,), -1), draft.parents + 1]))
    tokens = torch.cat([draft.tokens.new_full((1,), text[-1]), draft.tokens])  # without probes
    return Verification(len(tokens), (precise(session.extend(Rows(tokens, tree)).logits[row]), used))


def most_noise(dtype: torch.dtype, depth: int) -> float:
    """The most that rounding changes a score, relative to the largest one: two sums per layer, with random signs.

    At least the difference that a model's sessions are admitted with.
    """
    return max(tolerance(torch.float32), SLACK * torch.finfo(dtype).eps * (2 * depth) ** 0.5)


def count_verdicts(certificates: Sequence[Certificate]) -> CertificateCounts:
    """How many examples have each verdict."""
    verdicts = [each.verdict for each in certificates]
    laws = [each.law for each in certificates if each.law is not None]
    rounding: dict[int, float] = {}
    for rows, apart in (item for each in certificates for item in each.rounding.items()):
        rounding[rows] = max(apart, rounding.get(rows, 0.0))
    return CertificateCounts(
        equal=verdicts.count(EQUAL) + verdicts.count(EXACT),
        ties=verdicts.count(TIE) + verdicts.count(ROUNDING),
        defects=verdicts.count(DEFECT) + verdicts.count(SESSION_DEFECT),
        unjudged=verdicts.count(NO_LAW) if any(each.contexts for each in certificates) or NO_LAW in verdicts else None,
        law=max(laws) if laws else None,
        rounding={str(rows): rounding[rows] for rows in sorted(rounding)} or None,
    )
