"""Certificates of losslessness: a greedy text against the target's own, a sampled one by its output
distributions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from bild_lab.engine.session import ALL_LOGITS, LAST_LOGITS, DraftShape, LoadedModel, Rows, as_rows
from bild_lab.lab.measure.recorder import (
    OneRow,
    RecordedRound,
    difference,
    first_difference,
    largest,
    recorded_rounds,
)
from bild_lab.lab.schema.numbers import CertificateCounts

EQUAL, TIE, DEFECT = "equal", "numerical tie", "defect"
EXACT, ROUNDING, NO_FORM = "exact", "rounding", "no closed form"  # of sampled texts
SESSION_DEFECT = "defect of the model's session"
# causes come first
TEXT, DRAWS, LOGITS, OUTPUT, UNVERIFIED = "text", "draws", "logits", "output", "unverified"
# a tie may span this many times the numerical noise, and noise this many times the roundings of all
# layers
SLACK = 4
NEAR = 16  # tokens whose scores are compared between engines
SAME = 1e-6  # total variation up to which two distributions are the same
# a random number may miss a token's share of q by so much: two sums of q in other orders
DRAWN = 1e-6
NORMALIZED = 1e-4  # how far from 1 the sum of a softmax in float32 may be
# total variation of a drafter's q, declared and computed again, that rounding in float32 may make
REDRAWN = 1e-3


# How many rows ran, the logits that the rule read, and what it emits; None if that is not known.
Context = tuple[int, Float[Tensor, " vocab"], Float[Tensor, " vocab"] | None]


@dataclass(frozen=True)
class Certificate:
    """One example's verdict.

    position: of the first token that differs, or of the first context with a defect; None if there
    is none.

    Of a greedy text that differs: token, target_token: the method's and the target's own token
    there, None for a text that has ended. gap: how much lower the target scores the method's token
    than its own, one row after another, in nats. margin: between the target's two most likely
    tokens there, in nats. rows: how many rows ran in the forward that verified the position, and
    wide_gap: the gap when the text is scored anew with so many rows; below 0, the number of rows
    alone explains the token. noise: how much the target's scores of the two tokens change with the
    number of rows, in nats; at least their rounding error.

    Of a sampled text: check: which check found a defect. contexts: how many were judged. output:
    the largest total variation between what the rule emits and the target's distribution; None if
    the rule has no closed form. rounding: by number of rows, the largest such distance of the
    target's own distribution from that of one row after another.
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


@torch.inference_mode()
def certify(
    target: LoadedModel,
    request: Request,
    tokens: Sequence[int],
    own: Sequence[int],
    method: Method | None = None,
    others: Sequence[LoadedModel] = (),
) -> Certificate:
    """Compare emitted tokens with the target's own. Both are decoded greedily.

    A difference is a numerical tie if the target scores both tokens the same, within a few times
    its numerical noise. Otherwise it is a defect. A method that changes outputs on purpose has
    defects too. Scores that change by more than rounding can explain are a defect of the model's
    session, which runs rows together and one by one.

    method: what decoded the tokens. If it verifies drafts, the text is scored with the rows of its
    own verification; else in one forward. others: the same model on other engines; how far apart
    its scores are there is noise too.
    """
    position = first_difference(tokens, own)
    if position is None:
        return Certificate(EQUAL)
    token, target_token = (
        text[position] if position < len(text) else None for text in (tokens, own)
    )
    if token is None or target_token is None:  # one text continues after the other has ended
        return Certificate(DEFECT, position, token, target_token)
    rows, alone, wide = verification(target, request, own[:position], method)
    pair = torch.tensor([token, target_token], device=alone.device)
    if not bool(alone[pair].isfinite().all()):  # a processor forbids the token
        return Certificate(DEFECT, position, token, target_token)
    rounding = torch.finfo(target.dtype).eps * float(alone[pair].abs().max())
    elsewhere = [
        OneRow(each, request).after([*request.source.prompt, *own[:position]]) for each in others
    ]
    moved = [(logits - alone)[pair].abs() for logits in wide]
    changes = torch.cat([*moved, *(engine_difference(logits, alone) for logits in elsewhere)])
    noise = float(changes.max().clamp(min=rounding))  # NaN stays, which `max` of numbers may drop
    gap, wide_gap = (float(logits[target_token] - logits[token]) for logits in (alone, wide[0]))
    best, second = alone.topk(2).values.tolist()
    verdict = TIE if best - float(alone[pair].min()) <= SLACK * noise else DEFECT
    if not noise <= most_noise(target.dtype, target.depth) * largest([alone, *wide]):
        verdict = SESSION_DEFECT
    return Certificate(
        verdict, position, token, target_token, gap, best - second, noise, rows, wide_gap
    )


@torch.inference_mode()
def certify_replayed(
    target: LoadedModel, request: Request, tokens: Sequence[int], own: Sequence[int]
) -> Certificate:
    """The same of a text that another engine may have written: it is judged to its end.

    After a tie the target's own text is what it writes after the tied token. The verdict is that of
    the first defect, else of the first tie. The noise is also that between our engine and the
    modules of Transformers, if these differ.
    """
    others = () if target.engine == "hf" or target.bits is not None else (target.transformers,)
    first = certify(target, request, tokens, own, others=others)
    if first.verdict != TIE:
        return first
    prompt, scores = request.source.prompt, OneRow(target, request)
    for position in range(first.position + 1, len(tokens)):
        before = tokens[:position]
        best = int(most_likely(scores.after([*prompt, *before])[None])[0])
        later = certify(
            target, request, tokens, [*before, best, *tokens[position + 1 :]], others=others
        )
        if later.verdict not in (EQUAL, TIE):
            return later
    if not request.limits.reached([*prompt, *tokens]):  # the target goes on
        return Certificate(DEFECT, len(tokens))
    return first


Logits = Float[Tensor, " vocab"]


def engine_difference(logits: Logits, alone: Logits) -> Float[Tensor, " 1"]:
    """By how much two engines differ in their scores of the most likely tokens, up to a constant,
    in nats.
    """
    best = alone.topk(min(NEAR, len(alone))).indices
    moved = (logits - alone)[best]
    return (moved - moved.mean()).abs().max()[None]


def verification(
    target: LoadedModel, request: Request, emitted: Sequence[int], method: Method | None
) -> tuple[int, Logits, tuple[Logits, ...]]:
    """Score the context after these tokens with the rows of the round that verified it, else in one
    forward.

    Returns how many rows ran at once; the target's logits one row after another; and those with so
    many rows, then, if they are known, those that the rule read.
    """
    text, before = [*request.source.prompt, *emitted], request.limits.prompt_length - 1
    rows, output_spec, row, read = as_rows(text[before:]), LAST_LOGITS, 0, ()
    if isinstance(method, DraftThenVerify) and method.draft_shape > DraftShape.ROWS:
        for one, _ in recorded_rounds(method, request):
            found = {} if one is None else dict(one.contexts)
            if len(text) in found:
                draft = replace(one.draft, probes=None, shape=None)
                before, rows, output_spec = (
                    len(one.text) - 1,
                    Rows(draft.row_tokens(one.text[-1]), draft.tree),
                    ALL_LOGITS,
                )
                row = found[len(text)]
                read = (precise(one.logits[row]),)
                break
    model = OneRow(target, request)
    return (
        len(rows.tokens),
        model.after(text),
        (model.together(before, rows, output_spec)[row], *read),
    )


def most_noise(dtype: torch.dtype, depth: int) -> float:
    """The most that rounding changes a score, relative to the largest one: two sums per layer, with
    random signs.

    At least the difference that a model's sessions are admitted with.
    """
    return max(tolerance(torch.float32), SLACK * torch.finfo(dtype).eps * (2 * depth) ** 0.5)


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
      draft declares.

    The drafter's real distribution is q as declared, unless its model says otherwise one row after
    another, where rounding cannot explain a difference. A rule without a closed form gets no
    verdict, unless another check fails.
    """
    if not isinstance(method, DraftThenVerify):
        return Certificate(NO_FORM)
    again, contexts, wrong_draws = sampled_again(method, request)
    if (position := first_difference(again, tokens)) is not None:
        return Certificate(DEFECT, position, check=TEXT)
    defects = [(DRAWS, position) for position in wrong_draws]
    own, prompt = OneRow(target, request), request.source.prompt
    rounding: dict[int, float] = {}
    farthest: float | None = None
    for position in range(len(tokens)):
        if position not in contexts:
            defects.append((UNVERIFIED, position))
            continue
        rows, used, output = contexts[position]
        logits = own.after([*prompt, *tokens[:position]])
        p = distribution(request.sampling, used)
        moved = total_variation(p, distribution(request.sampling, logits))
        rounding[rows] = max(moved, rounding.get(rows, 0.0))
        if not difference(used, logits) <= most_noise(target.dtype, target.depth):
            defects.append((LOGITS, position))
        if output is not None:
            farthest = max(farthest or 0.0, total_variation(output, p))
            if not farthest <= SAME:
                defects.append((OUTPUT, position))
    known = {
        position: output for position, (_, _, output) in contexts.items() if position < len(tokens)
    }
    found = {"contexts": len(known), "output": farthest, "rounding": dict(sorted(rounding.items()))}
    if defects:
        order = (DRAWS, LOGITS, OUTPUT, UNVERIFIED)  # the cause before its consequences
        check, position = min(defects, key=lambda one: (order.index(one[0]), one[1]))
        return Certificate(
            SESSION_DEFECT if check == LOGITS else DEFECT, position, check=check, **found
        )
    if not known or any(output is None for output in known.values()):
        return Certificate(NO_FORM, **found)
    return Certificate(EXACT if max(rounding.values()) <= SAME else ROUNDING, **found)


def sampled_again(
    method: DraftThenVerify, request: Request
) -> tuple[list[int], dict[int, Context], list[int]]:
    """The text once more, its contexts by their place in it, and where drafted tokens were not
    drawn from their q.
    """
    drafter, start = one_row_of_drafter(method, request), request.limits.prompt_length
    again: list[int] = []
    contexts: dict[int, Context] = {}
    wrong_draws = []
    for one, new_tokens in recorded_rounds(method, request):
        again += new_tokens
        if one is None:
            continue
        if not drawn_as_declared(one.draft):
            wrong_draws.append(len(one.text) - start)
        output = output_of(one, request, drafter)
        for length, row in one.contexts:
            emits = None if output is None else output[row].clone()
            contexts[length - start] = (one.rows, one.logits[row].clone(), emits)
    return again, contexts, wrong_draws


def one_row_of_drafter(method: DraftThenVerify, request: Request) -> OneRow | None:
    """The model that drafts, one row after another; None where rounding may be as large as another
    distribution.
    """
    model = method.drafter.draws_from
    known = model is not None and (model.engine == "kernels" or model.dtype.itemsize > 2)
    return OneRow(model, request) if known else None


def output_of(
    one: RecordedRound, request: Request, drafter: OneRow | None
) -> Float[Tensor, "n+1 vocab"] | None:
    """The distribution of what a round's rule emits after each row; None if it has no closed
    form.
    """
    held = {name: getattr(one.draft, name) for name in ("probs", "own_probs")}
    draft = replace(
        one.draft, **{name: exactly(probs) for name, probs in held.items() if probs is not None}
    )
    logits = one.logits.double()
    drawn = drafter_probs(draft, logits)
    drawn = drawn / drawn.sum(-1, keepdim=True)
    if drafter is not None and draft.probs is not None:
        children, text = judged_nodes(draft), list(one.text)
        # the first child of each by the drafter's model; later siblings as declared
        for _, row in one.contexts:
            text += [draft.token_list[row - 1]] if row else []
            if children[row]:
                first = children[row][0]
                real = padded_like(
                    drawn, distribution(request.sampling, drafter.after(text))[None]
                )[0]
                if total_variation(real, drawn[first]) > REDRAWN:
                    drawn[first] = real
    return one.rule.output_distribution(draft, logits, request, drawn)


def exactly(probs: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Distributions in float64, without the rounding of a sum in float32.

    What sums to something else stays.
    """
    probs = probs.double()
    total = probs.sum(-1, keepdim=True)
    return torch.where((total - 1).abs() < NORMALIZED, probs / total, probs)


def drawn_as_declared(draft: Draft) -> bool:
    """Whether each token is the one that its random number picks from its row of q; True if no
    numbers are given.
    """
    if draft.uniforms is None or draft.probs is None or not len(draft):
        return True
    probs = draft.probs.double()
    probs, drawn = probs / probs.sum(-1, keepdim=True), draft.tokens[:, None]
    reached = probs.cumsum(-1).gather(-1, drawn)[:, 0]
    before = reached - probs.gather(-1, drawn)[:, 0]
    uniforms = draft.uniforms.to(reached)
    return bool(((before - DRAWN <= uniforms) & (uniforms <= reached + DRAWN)).all())


def distribution(sampling: Sampling, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """What tokens are sampled from, in float64."""
    return sampling.probs(logits.double()[None])[0]


def total_variation(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> float:
    """Half the sum of |p − q|: the largest difference in the probability of any set of tokens; 1 if
    one is NaN.
    """
    return float((p.double() - q.double()).abs().sum().nan_to_num(nan=2.0)) / 2


def count_verdicts(certificates: Sequence[Certificate]) -> CertificateCounts:
    """How many examples have each verdict."""
    verdicts = [each.verdict for each in certificates]
    outputs = [each.output for each in certificates if each.output is not None]
    rounding: dict[int, float] = {}
    for rows, moved in (item for each in certificates for item in each.rounding.items()):
        rounding[rows] = max(moved, rounding.get(rows, 0.0))
    return CertificateCounts(
        equal=verdicts.count(EQUAL) + verdicts.count(EXACT),
        ties=verdicts.count(TIE) + verdicts.count(ROUNDING),
        defects=verdicts.count(DEFECT) + verdicts.count(SESSION_DEFECT),
        unjudged=verdicts.count(NO_FORM)
        if any(each.contexts for each in certificates) or NO_FORM in verdicts
        else None,
        output=max(outputs) if outputs else None,
        rounding={str(rows): rounding[rows] for rows in sorted(rounding)} or None,
    )
