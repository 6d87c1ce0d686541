"""Certificates of sampled texts: the distribution of what a rule emits must be the target's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.speculative.sampling import drafter_probs, padded_like
from bild_lab.engine.methods.speculative.tree_acceptance import judged_nodes
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel, Model
from bild_lab.errors import UserError
from bild_lab.lab.measure.certificate import (
    DEFECT,
    EXACT,
    NO_FORM,
    ROUNDING,
    SESSION_DEFECT,
    Certificate,
    largest_by_rows,
    most_noise,
)
from bild_lab.lab.measure.declared import (
    Distribution,
    are_by_chance,
    deviation,
    sum_of,
    token_values,
)
from bild_lab.lab.measure.recorder import (
    Logits,
    RecordedRound,
    RowByRow,
    first_difference,
    recorded_rounds,
    relative_difference,
)
from bild_lab.lab.measure.redraws import draws_are_kept

# checks of sampled texts
TEXT, DRAWS, LOGITS, OUTPUT, UNVERIFIED = "text", "draws", "logits", "output", "unverified"
RULE = "rule"  # of all texts of a point together
CAUSES_FIRST = (DRAWS, LOGITS, OUTPUT, UNVERIFIED)
REDRAWN_CONTEXTS = 8  # of a text, in which it is drafted again
SAME_OUTPUT = 1e-6  # total variation up to which two distributions are equal
# a random number may miss a token's share of q by so much: two sums of q in other orders
DRAW_TOLERANCE = 1e-6
NORMALIZED = 1e-4  # how far from 1 the sum of a softmax in float32 may be
# total variation of a drafter's q, declared and computed again, that rounding in float32 may make
DRAFTER_ROUNDING = 1e-3
Distributions = Float[Tensor, "n vocab"]


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
    rounding = largest_by_rows((context.rows, context.moved) for context in judged)
    distances = [context.output for context in judged if context.output is not None]
    findings = {
        "contexts": len(judged),
        "output": max(distances) if distances else None,
        "rounding": rounding,
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
