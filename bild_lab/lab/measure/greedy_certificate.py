"""Certificates of greedy texts: each is the target's own, up to numerical ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import most_likely, precise
from bild_lab.engine.session import (
    ALL_LOGITS,
    LAST_LOGITS,
    DraftShape,
    LoadedModel,
    Rows,
    as_rows,
)
from bild_lab.lab.measure.certificate import (
    DEFECT,
    EQUAL,
    SESSION_DEFECT,
    SLACK,
    TIE,
    Certificate,
    most_noise,
    noise_of_layers,
)
from bild_lab.lab.measure.recorder import (
    Logits,
    RecordedRound,
    RowByRow,
    first_difference,
    largest_logit,
    recorded_rounds,
)

COMPARED_TOKENS = 16  # the most likely tokens, whose scores are compared between engines


@torch.inference_mode()
def certify(
    target: LoadedModel,
    request: Request,
    tokens: Sequence[int],
    target_tokens: Sequence[int],
    method: Method | None = None,
    other_engines: Sequence[LoadedModel] = (),
) -> Certificate:
    """Compare emitted tokens with the target's own, to their end. Both are decoded greedily.

    A difference is a numerical tie if the target scores both tokens the same, within a few times
    its numerical noise, and the rule read that the emitted one is no less likely. Otherwise it is a
    defect. A method that changes outputs on purpose has defects too. Scores that change by more
    than rounding can explain are a defect of the model's session, which runs rows together and one
    by one.

    After a tie the target's own text is what it writes after the tied token. The verdict is that of
    the first defect, else of the first tie.

    method: what decoded the tokens. If it verifies drafts, the text is scored with the rows of its
    own verification; else in one forward. other_engines: the target on other engines; how far apart
    its scores are there is noise too.
    """
    position = first_difference(tokens, target_tokens)
    if position is None:
        return Certificate(EQUAL)
    if min(len(tokens), len(target_tokens)) == position:  # one goes on after the other has ended
        return _ended_elsewhere(position, tokens, target_tokens)
    judge = partial(_judge_token, target, request, tokens, method, other_engines)
    first_verdict = judge(position, target_tokens[position])
    if first_verdict.verdict != TIE:
        return first_verdict
    prompt, scores = request.source.prompt, RowByRow(target, request)
    for position in range(first_verdict.position + 1, len(tokens)):
        target_token = int(most_likely(scores.after([*prompt, *tokens[:position]])[None])[0])
        if tokens[position] == target_token:
            continue
        later_verdict = judge(position, target_token)
        if later_verdict.verdict != TIE:
            return later_verdict
    if not request.limits.reached([*prompt, *tokens]):  # the target goes on
        return Certificate(DEFECT, len(tokens))
    return first_verdict


def certify_replayed(
    target: LoadedModel, request: Request, tokens: Sequence[int], target_tokens: Sequence[int]
) -> Certificate:
    """Compare a text that another engine may have written with the target's own.

    The noise is also that between our engine and the modules of Transformers, if these differ.
    """
    has_other_engine = target.engine != "hf" and target.bits is None
    other_engines = (target.transformers,) if has_other_engine else ()
    return certify(target, request, tokens, target_tokens, other_engines=other_engines)


def _ended_elsewhere(
    position: int, tokens: Sequence[int], target_tokens: Sequence[int]
) -> Certificate:
    """One text ends where the other goes on."""
    token = tokens[position] if position < len(tokens) else None
    target_token = target_tokens[position] if position < len(target_tokens) else None
    return Certificate(DEFECT, position, token, target_token)


def _judge_token(
    target: LoadedModel,
    request: Request,
    tokens: Sequence[int],
    method: Method | None,
    other_engines: Sequence[LoadedModel],
    position: int,
    target_token: int,
) -> Certificate:
    """A token that is not the target's own after the tokens before it: a tie, or a defect."""
    token = tokens[position]
    context = [*request.source.prompt, *tokens[:position]]
    scored = verification(target, request, context, method)
    alone, together = scored.alone, scored.together
    pair = torch.tensor([token, target_token], device=alone.device)
    if not bool(alone[pair].isfinite().all()):  # a processor forbids the token
        return Certificate(DEFECT, position, token, target_token)
    by_rows = torch.cat([(logits - alone)[pair].abs() for logits in together])
    by_engine = [
        engine_difference(RowByRow(model, request).after(context), alone) for model in other_engines
    ]
    rounding = resolution(alone, target.dtype) * float(alone[pair].abs().max())
    # NaN stays, which `max` of numbers may drop
    noise = float(torch.cat([by_rows, *by_engine]).max().clamp(min=rounding))
    verdict = TIE if _is_tie(scored, token, target_token, noise) else DEFECT
    if not _is_rounding(target, scored, float(by_rows.max()), noise):
        verdict = SESSION_DEFECT
    best, second_best = alone.topk(2).values.tolist()
    return Certificate(
        verdict,
        position,
        token,
        target_token,
        gap=float(alone[target_token] - alone[token]),
        margin=best - second_best,
        noise=noise,
        rows=scored.rows,
        wide_gap=float(together[0][target_token] - together[0][token]),
    )


def _is_tie(scored: Verification, token: int, target_token: int, noise: float) -> bool:
    """Whether both tokens are within the noise of the best score, and the rule read no lower one
    for the emitted token. noise: in nats.
    """
    alone, read = scored.alone, scored.together[-1]
    worse_score = min(float(alone[token]), float(alone[target_token]))
    is_within_noise = float(alone.max()) - worse_score <= SLACK * noise
    if scored.emitted != token:  # decoded again, the rule did not read these and emit it
        return is_within_noise
    return is_within_noise and bool(read[token] >= read[target_token])


def _is_rounding(
    target: LoadedModel, scored: Verification, largest_by_rows: float, noise: float
) -> bool:
    """Whether rounding can explain how far the scores are apart; NaN it cannot.

    largest_by_rows: between numbers of rows. noise: also between engines. Both are in nats.
    """
    largest = largest_logit([scored.alone, *scored.together])
    rows_agree = largest_by_rows <= most_noise(target) * largest
    engines_agree = noise <= noise_of_layers(target) * largest
    return rows_agree and engines_agree


def resolution(logits: Logits, dtype: torch.dtype) -> float:
    """The relative spacing of scores of a model in this precision: that of float32 where they are
    finer than the precision, as where sums are kept in float32.
    """
    are_rounded = torch.equal(logits.to(dtype).to(logits.dtype), logits)
    return torch.finfo(dtype if are_rounded else torch.float32).eps


def engine_difference(logits: Logits, alone: Logits) -> Float[Tensor, " 1"]:
    """How much two engines differ in their scores of the most likely tokens, up to a constant,
    in nats.
    """
    likely_tokens = alone.topk(min(COMPARED_TOKENS, len(alone))).indices
    changes = (logits - alone)[likely_tokens]
    return (changes - changes.mean()).abs().max()[None]


@dataclass(frozen=True)
class Verification:
    """The target's logits after a context: `alone`, one row after another, and `together`, with as
    many rows as verified it, then, if they are known, those that the rule read.

    rows: how many ran at once. emitted: the token that the rule emitted after reading them; None if
    they are not known.
    """

    rows: int
    alone: Logits
    together: tuple[Logits, ...]
    emitted: int | None = None


def verification(
    target: LoadedModel, request: Request, context: Sequence[int], method: Method | None
) -> Verification:
    """Score a context with the rows of the round that verified it, else in one forward.

    context: the tokens so far, prompt included.
    """
    model = RowByRow(target, request)
    alone = model.after(context)
    verified = _verifying_round(request, context, method)
    if verified is None:
        cached_length = request.limits.prompt_length - 1
        rows = as_rows(context[cached_length:])
        together = model.together(cached_length, rows, LAST_LOGITS)[0]
        return Verification(len(rows.tokens), alone, (together,))
    recorded, emitted = verified
    draft = replace(recorded.draft, probes=None, shape=None)
    cached_length = len(recorded.text) - 1
    rows = Rows(draft.row_tokens(recorded.text[-1]), draft.tree)
    row = dict(recorded.contexts)[len(context)]
    together = model.together(cached_length, rows, ALL_LOGITS)[row]
    read = precise(recorded.logits[row])
    return Verification(len(rows.tokens), alone, (together, read), emitted)


def _verifying_round(
    request: Request, context: Sequence[int], method: Method | None
) -> tuple[RecordedRound, int] | None:
    """The round that emitted a token after this context, and the token; None if no draft was
    verified there, or the text has other tokens when it is decoded again.
    """
    if not isinstance(method, DraftThenVerify) or method.draft_shape <= DraftShape.ROWS:
        return None
    text = list(request.source.prompt)
    for recorded, new_tokens in recorded_rounds(method, request):
        text += new_tokens
        if len(text) <= len(context):
            continue
        if recorded is None or text[: len(context)] != list(context):
            return None
        return recorded, text[len(context)]
    return None
