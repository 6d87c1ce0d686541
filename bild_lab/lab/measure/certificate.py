"""Certificates of losslessness: a greedy text against the target's own, a sampled one by its output
distributions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.speculative.sampling import (
    drafter_probs,
    padded_like,
)
from bild_lab.engine.methods.speculative.tree_acceptance import judged_nodes
from bild_lab.engine.models.hf.admission import tolerance
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, most_likely, precise
from bild_lab.engine.session import (
    ALL_LOGITS,
    LAST_LOGITS,
    DraftShape,
    LoadedModel,
    Model,
    Rows,
    as_rows,
)
from bild_lab.errors import UserError
from bild_lab.lab.measure.declared import are_by_chance, deviation, sum_of, token_values
from bild_lab.lab.measure.recorder import (
    Logits,
    RecordedRound,
    RowByRow,
    first_difference,
    largest_logit,
    recorded_rounds,
    relative_difference,
)
from bild_lab.lab.measure.redraws import draws_are_kept
from bild_lab.lab.schema.numbers import CertificateCounts

# verdicts on greedy texts, and on sampled ones
EQUAL, TIE, DEFECT = "equal", "numerical tie", "defect"
EXACT, ROUNDING, NO_FORM = "exact", "rounding", "no closed form"
NO_TEXT = "no text"  # another engine failed to give one
SESSION_DEFECT = "defect of the model's session"
# checks of sampled texts
TEXT, DRAWS, LOGITS, OUTPUT, UNVERIFIED = "text", "draws", "logits", "output", "unverified"
RULE = "rule"  # of all texts of a point together
CAUSES_FIRST = (DRAWS, LOGITS, OUTPUT, UNVERIFIED)
# a tie may span this many times the numerical noise, and noise this many times the roundings of all
# layers
SLACK = 4
REDRAWN_CONTEXTS = 8  # of a text, in which it is drafted again
COMPARED_TOKENS = 16  # the most likely tokens, whose scores are compared between engines
SAME_OUTPUT = 1e-6  # total variation up to which two distributions are equal
# a random number may miss a token's share of q by so much: two sums of q in other orders
DRAW_TOLERANCE = 1e-6
NORMALIZED = 1e-4  # how far from 1 the sum of a softmax in float32 may be
# total variation of a drafter's q, declared and computed again, that rounding in float32 may make
DRAFTER_ROUNDING = 1e-3

Distribution = Float[Tensor, " vocab"]
Distributions = Float[Tensor, "n vocab"]


@dataclass(frozen=True)
class Certificate:
    """One example's verdict.

    position: of the first token that differs, or of the first context with a defect; None if there
    is none.

    For a greedy text that differs: token, target_token: the method's and the target's own token
    there, None for a text that has ended. gap: how much lower the target scores the method's token
    than its own, one row after another, in nats. margin: between the target's two most likely
    tokens there, in nats. rows: how many rows ran in the forward that verified the position, and
    wide_gap: the gap when the text is scored anew with so many rows; below 0, the number of rows
    alone explains the token. noise: how much the target's scores of the two tokens change with the
    number of rows, in nats; at least their rounding error.

    For a sampled text: check: which check found a defect. contexts: how many were judged. output:
    the largest total variation between what the rule emits and the target's distribution; None if
    the rule has no closed form. rounding: by number of rows, the largest such distance of the
    target's own distribution from that of one row after another. deviations: of the emitted tokens
    from what the rule declares (`declared`).
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
    output: float | None = None
    rounding: Mapping[int, float] = field(default_factory=dict)
    deviations: Mapping[str, tuple[float, float]] = field(default_factory=dict)


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
    first_verdict = _judge_token(
        target, request, tokens, position, target_tokens[position], method, other_engines
    )
    if first_verdict.verdict != TIE:
        return first_verdict
    prompt, scores = request.source.prompt, RowByRow(target, request)
    for position in range(first_verdict.position + 1, len(tokens)):
        target_token = int(most_likely(scores.after([*prompt, *tokens[:position]])[None])[0])
        if tokens[position] == target_token:
            continue
        later_verdict = _judge_token(
            target, request, tokens, position, target_token, method, other_engines
        )
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
    position: int,
    target_token: int,
    method: Method | None,
    other_engines: Sequence[LoadedModel],
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
    best, second_best = alone.topk(2).values.tolist()
    is_tie = best - float(alone[pair].min()) <= SLACK * noise
    if scored.emitted == token:  # decoded again, the rule read these and emitted it
        is_tie = is_tie and bool(together[-1][token] >= together[-1][target_token])
    verdict = TIE if is_tie else DEFECT
    largest = largest_logit([alone, *together])
    if not (
        float(by_rows.max()) <= most_noise(target) * largest
        and noise <= noise_of_layers(target) * largest
    ):
        verdict = SESSION_DEFECT
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


@torch.inference_mode()
def certify_sampled(
    method: Method, target: LoadedModel, request: Request, tokens: Sequence[int]
) -> Certificate:
    """Judge every context in which a token of this text was sampled. request: seeded as when the
    text was sampled.

    The text is sampled again, with a recorder. Three things are computed in each context, in
    float64:

    - output: the distribution of what the rule emits, over accepted and replaced tokens, where each
      drafted token is drawn from the drafter's real distribution. It must be the target's within
      1e-6 of total variation.
    - logits: those that the rule read, many rows at once over a cache, against one row after
      another. What rounding can explain is reported by the number of rows; more is a defect of the
      model's session.
    - draws: each drafted token must be the one that its random number picks from the q that the
      draft declares, and none may be dropped for what it is (`redraws`, in the text's first 8
      contexts that draw).

    That the rule emits what it declares is judged over all texts of a point (`judge_together`).

    The drafter's real distribution is q as declared, unless its model says otherwise one row after
    another, where rounding cannot explain a difference. It is not known of tokens that came without
    their random numbers from a drafter that names no model. Where it is not known, or the rule has
    no closed form, there is no verdict, unless another check fails.
    """
    if not isinstance(method, DraftThenVerify):
        return Certificate(NO_FORM)
    resampled, contexts, wrong_draws = resample(method, request)
    if (position := first_difference(resampled, tokens)) is not None:
        return Certificate(DEFECT, position, check=TEXT)
    defects = [(DRAWS, position) for position in wrong_draws]
    scores, prompt = RowByRow(target, request), request.source.prompt
    judged: list[JudgedContext] = []
    for position, token in enumerate(tokens):
        if position not in contexts:
            defects.append((UNVERIFIED, position))
            continue
        alone = scores.after([*prompt, *tokens[:position]])
        judged.append(_judge_context(contexts[position], token, alone, request.sampling, target))
        defects += [(check, position) for check in judged[-1].failed]
    return _verdict_of_contexts(judged, defects)


def _verdict_of_contexts(
    judged: Sequence[JudgedContext], defects: Sequence[tuple[str, int]]
) -> Certificate:
    """A sampled text's certificate. defects: the checks that failed, each with its position."""
    rounding: dict[int, float] = {}
    for context in judged:
        rounding[context.rows] = max(context.moved, rounding.get(context.rows, 0.0))
    distances = [context.output for context in judged if context.output is not None]
    findings = {
        "contexts": len(judged),
        "output": max(distances) if distances else None,
        "rounding": dict(sorted(rounding.items())),
        "deviations": sum_of(context.deviations for context in judged),
    }
    if defects:
        check, position = min(
            defects, key=lambda defect: (CAUSES_FIRST.index(defect[0]), defect[1])
        )
        verdict = SESSION_DEFECT if check == LOGITS else DEFECT
        return Certificate(verdict, position, check=check, **findings)
    if not judged or len(distances) < len(judged):
        return Certificate(NO_FORM, **findings)
    verdict = EXACT if max(rounding.values()) <= SAME_OUTPUT else ROUNDING
    return Certificate(verdict, **findings)


@dataclass(frozen=True)
class JudgedContext:
    """What was found in one context. rows: how many ran in the verifying forward. moved: the total
    variation between the target's distribution there and that of one row after another. output: that
    between what the rule emits and the target's distribution; None if it has no closed form.
    deviations: as in `Certificate`. failed: checks that found a defect.
    """

    rows: int
    moved: float
    output: float | None
    deviations: Mapping[str, tuple[float, float]]
    failed: tuple[str, ...]


def _judge_context(
    context: SampledContext, token: int, alone: Logits, sampling: Sampling, target: LoadedModel
) -> JudgedContext:
    """token: that was emitted. alone: the target's logits, one row after another."""
    failed = []
    target_probs = distribution(sampling, context.logits)
    moved = total_variation(target_probs, distribution(sampling, alone))
    if not relative_difference(context.logits, alone) <= most_noise(target):
        failed.append(LOGITS)
    if context.output is None:
        return JudgedContext(context.rows, moved, None, {}, tuple(failed))
    distance = total_variation(context.output, target_probs)
    if not distance <= SAME_OUTPUT:
        failed.append(OUTPUT)
    deviations = {
        name: deviation(token, context.output, values)
        for name, values in token_values(context.output, context.proposed).items()
    }
    return JudgedContext(context.rows, moved, distance, deviations, tuple(failed))


@dataclass(frozen=True)
class SampledContext:
    """A context in which a token was sampled. rows: how many ran in the verifying forward. logits:
    those that the rule read. output: the distribution of what it emits; None if it has no closed
    form. proposed: what a drafted token is drawn from there; None where none is.
    """

    rows: int
    logits: Logits
    output: Distribution | None
    proposed: Distribution | None


def resample(
    method: DraftThenVerify, request: Request
) -> tuple[list[int], dict[int, SampledContext], list[int]]:
    """The text once more, its contexts by their place in it, and where drafted tokens were not
    drawn from their q, or are dropped for what they are.
    """
    prompt_length = request.limits.prompt_length
    drafters: dict[int, RowByRow | None] = {}  # by the model that drew
    tokens: list[int] = []
    contexts: dict[int, SampledContext] = {}
    wrong_draws: list[int] = []
    drawn_after: list[tuple[int, ...]] = []
    for recorded, new_tokens in recorded_rounds(method, request):
        tokens += new_tokens
        if recorded is None:
            continue
        if recorded.draft.probs is not None:
            drawn_after.append(recorded.text)
        if not drawn_as_declared(recorded.draft):
            wrong_draws.append(len(recorded.text) - prompt_length)
        drawing_model = recorded.draft.drawn_from
        if id(drawing_model) not in drafters:
            drafters[id(drawing_model)] = one_row_of_drafter(drawing_model, request)
        for length, context in _contexts_of(recorded, request, drafters[id(drawing_model)]):
            contexts[length - prompt_length] = context
    for text in drawn_after[:REDRAWN_CONTEXTS]:
        if not draws_are_kept(method, request, text):
            wrong_draws.append(len(text) - prompt_length)
    return tokens, contexts, wrong_draws


def _contexts_of(
    recorded: RecordedRound, request: Request, drafter: RowByRow | None
) -> Iterator[tuple[int, SampledContext]]:
    """The contexts of a round, each with its length in tokens."""
    draft, output, drawn = recorded.draft, None, None
    draws_are_told = draft.probs is None or draft.uniforms is not None
    if draws_are_told or draft.drawn_from is not None:
        output, drawn = output_of(recorded, request, drafter)
    children = judged_nodes(draft)
    for length, row in recorded.contexts:
        yield (
            length,
            SampledContext(
                recorded.rows,
                recorded.logits[row].clone(),
                None if output is None else output[row].clone(),
                None if drawn is None or not children[row] else drawn[children[row][0]].clone(),
            ),
        )


def one_row_of_drafter(model: Model | None, request: Request) -> RowByRow | None:
    """The model that drafts, one row after another; None where rounding may be as large as another
    distribution.
    """
    known = model is not None and (model.engine == "kernels" or model.dtype.itemsize > 2)
    return RowByRow(model, request) if known else None


def output_of(
    recorded: RecordedRound, request: Request, drafter: RowByRow | None
) -> tuple[Float[Tensor, "n+1 vocab"] | None, Distributions]:
    """The distribution of what a round's rule emits after each row, None if it has no closed form;
    and that which each node was really drawn from.
    """
    draft = replace(
        recorded.draft,
        probs=in_float64(recorded.draft.probs),
        unscaled_probs=in_float64(recorded.draft.unscaled_probs),
    )
    logits = recorded.logits.double()
    drawn = drafter_probs(draft, logits)
    drawn = drawn / drawn.sum(-1, keepdim=True)
    if drafter is not None and draft.probs is not None:
        children, text = judged_nodes(draft), list(recorded.text)
        # the first child of each by the drafter's model; later siblings as declared
        for _, row in recorded.contexts:
            if row:
                text.append(draft.token_list[row - 1])
            if children[row]:
                node = children[row][0]
                model_probs = distribution(request.sampling, drafter.after(text))
                model_probs = padded_like(drawn, model_probs[None])[0]
                if total_variation(model_probs, drawn[node]) > DRAFTER_ROUNDING:
                    drawn[node] = model_probs
    output = recorded.rule.output_distribution(draft, logits, request, drawn)
    if output is not None and output.shape != logits.shape:
        raise UserError(
            f"output_distribution of {type(recorded.rule).__name__} must give a row for each row of"
            f" the logits, {list(logits.shape)}, got {list(output.shape)}"
        )
    return output, drawn


def in_float64(probs: Distributions | None) -> Distributions | None:
    """Distributions in float64, without the rounding of a sum in float32; None stays.

    A row with another sum stays.
    """
    if probs is None:
        return None
    probs = probs.double()
    sums = probs.sum(-1, keepdim=True)
    return torch.where((sums - 1).abs() < NORMALIZED, probs / sums, probs)


def drawn_as_declared(draft: Draft) -> bool:
    """Whether each token is the one that its random number picks from its row of q; True if no
    numbers are given.
    """
    if draft.uniforms is None or draft.probs is None or not len(draft):
        return True
    probs = draft.probs.double()
    probs = probs / probs.sum(-1, keepdim=True)
    tokens = draft.tokens[:, None]
    upper = probs.cumsum(-1).gather(-1, tokens)[:, 0]
    lower = upper - probs.gather(-1, tokens)[:, 0]
    uniforms = draft.uniforms.to(upper)
    inside = (lower - DRAW_TOLERANCE <= uniforms) & (uniforms <= upper + DRAW_TOLERANCE)
    return bool(inside.all())


def distribution(sampling: Sampling, logits: Logits) -> Distribution:
    """What tokens are sampled from, in float64."""
    return sampling.probs(logits.double()[None])[0]


def total_variation(p: Distribution, q: Distribution) -> float:
    """Half the sum of |p − q|: the largest difference in the probability of any set of tokens; 1 if
    one is NaN.
    """
    return float((p.double() - q.double()).abs().sum().nan_to_num(nan=2.0)) / 2


def judge_together(certificates: Sequence[Certificate]) -> list[Certificate]:
    """The certificates of a point's sampled texts. Those that find the target's distribution are
    defects instead if the texts' tokens, all together, were not drawn from what the rule declares.

    Texts in which it declares another distribution than the target's, or none, count too: which
    texts these are depends on their tokens. Those with another defect do not.
    """

    def agrees(certificate: Certificate) -> bool:
        return certificate.verdict in (EXACT, ROUNDING)

    judged = [
        certificate
        for certificate in certificates
        if agrees(certificate) or certificate.verdict == NO_FORM or certificate.check == OUTPUT
    ]
    if are_by_chance(sum_of(certificate.deviations for certificate in judged)):
        return list(certificates)
    return [
        replace(certificate, verdict=DEFECT, check=RULE) if agrees(certificate) else certificate
        for certificate in certificates
    ]


def count_verdicts(certificates: Sequence[Certificate], claimed: bool) -> CertificateCounts:
    """How many examples have each verdict. claimed: whether the method says that it is lossless."""
    verdicts = Counter(certificate.verdict for certificate in certificates)
    outputs = [certificate.output for certificate in certificates if certificate.output is not None]
    rounding: dict[int, float] = {}
    for certificate in certificates:
        for rows, moved in certificate.rounding.items():
            rounding[rows] = max(moved, rounding.get(rows, 0.0))
    sampled = any(certificate.contexts for certificate in certificates)
    unjudged = verdicts[NO_FORM] + verdicts[NO_TEXT]
    return CertificateCounts(
        equal=verdicts[EQUAL] + verdicts[EXACT],
        ties=verdicts[TIE] + verdicts[ROUNDING],
        defects=verdicts[DEFECT] + verdicts[SESSION_DEFECT],
        unjudged=unjudged if sampled or unjudged else None,
        output=max(outputs) if outputs else None,
        rounding={str(rows): rounding[rows] for rows in sorted(rounding)} or None,
        claimed=claimed,
    )
