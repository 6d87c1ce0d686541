"""A certificate of losslessness for sampled text: each round's output distribution against the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import as_wide_as, drafter_probs
from bild_lab.engine.acceptance.trees import judged_nodes
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.protocols import Acceptance, HasLaw, Method
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.lab.measure.certificate import (
    DEFECT,
    EXACT,
    NO_LAW,
    ROUNDING,
    SESSION_DEFECT,
    Certificate,
    most_noise,
)
from bild_lab.lab.measure.witness import (
    OneRow,
    difference,
    distribution,
    total_variation,
    visited,
    witnessed,
)

SAME = 1e-6  # total variation up to which two distributions are the same
DRAWN = 1e-6  # a random number may miss a token's share of q by so much: two sums of q in other orders
NORMALIZED = 1e-4  # how far from 1 the sum of a softmax in float32 may be
REDRAWN = 1e-3  # total variation of a drafter's q, declared and computed again, that rounding in float32 may make

# which check finds a defect
TEXT, UNVERIFIED, LOGITS, LAW, DRAWS = "text", "unverified", "logits", "law", "draws"


@torch.inference_mode()
def certify_sampled(method: Method, target: LoadedModel, request: Request, tokens: Sequence[int]) -> Certificate:
    """Judge every context in which a token of this text was sampled. request: seeded as when the text was sampled.

    The text is sampled again, with a witness. Three things are computed in each context, in float64:

    - law: the distribution that the rule emits, over accepted and replaced tokens, where each drafted token is drawn
      from the drafter's real distribution. It must be the target's within 1e-6 of total variation.
    - logits: those that the rule read, many rows at once over a cache, against one row after another. What rounding
      can explain is told by the number of rows; more is a defect of the model's session.
    - draws: each drafted token must be the one that its random number picks from the q that the draft declares.

    The drafter's real distribution is q as declared, unless its model says otherwise one row after another, where
    rounding cannot explain a difference. A rule without a closed form gets no verdict, unless another check fails.
    """
    if not isinstance(method, DraftThenVerify):
        return Certificate(NO_LAW)
    rounds = Rounds(method, request)
    again = witnessed(method, request, rounds.see)
    if again != list(tokens):
        pairs = enumerate(zip(again, tokens, strict=False))
        first = next((at for at, (one, other) in pairs if one != other), min(len(again), len(tokens)))
        return Certificate(DEFECT, first, check=TEXT)
    contexts = {each.position: each for each in rounds.contexts if each.position < len(tokens)}
    own, prompt = OneRow(target, request), request.source.prompt
    rounding: dict[int, float] = {}
    farthest: float | None = None
    found: list[tuple[str, str, int]] = []
    for position in range(len(tokens)):
        if (one := contexts.get(position)) is None:
            found.append((DEFECT, UNVERIFIED, position))
            continue
        logits = own.behind([*prompt, *tokens[:position]])
        p = distribution(request.sampling, one.used)
        apart = total_variation(p, distribution(request.sampling, logits))
        rounding[one.rows] = max(apart, rounding.get(one.rows, 0.0))
        if not difference(one.used, logits) <= most_noise(target.dtype, target.depth):
            found.append((SESSION_DEFECT, LOGITS, position))
        if one.law is not None:
            farthest = max(farthest or 0.0, total_variation(one.law, p))
            if not farthest <= SAME:
                found.append((DEFECT, LAW, position))
    found += [(DEFECT, DRAWS, position) for position in rounds.wrong_draws]
    known = len(contexts) > 0 and all(each.law is not None for each in contexts.values())
    told = {"contexts": len(contexts), "law": farthest, "rounding": dict(sorted(rounding.items()))}
    if found:
        order = (DRAWS, LOGITS, LAW, UNVERIFIED)  # the cause before its consequences
        verdict, check, position = min(found, key=lambda one: (order.index(one[1]), one[2]))
        return Certificate(verdict, position, check=check, **told)
    if not known:
        return Certificate(NO_LAW, **told)
    return Certificate(EXACT if max(rounding.values()) <= SAME else ROUNDING, **told)


@dataclass(frozen=True)
class Context:
    """A place in the text where a round emitted a token.

    position: among the emitted tokens. rows: how many ran in the verifying forward. used: the logits that the rule
    read. law: what it emits there, None if not known.
    """

    position: int
    rows: int
    used: Float[Tensor, " vocab"]
    law: Float[Tensor, " vocab"] | None


@dataclass
class Rounds:
    """Notes the contexts of each round, and the drafted tokens that were not drawn from their q.

    wrong_draws: the positions of such tokens' rounds.
    """

    method: DraftThenVerify
    request: Request
    contexts: list[Context] = field(default_factory=list)
    wrong_draws: list[int] = field(default_factory=list)
    _drafter: OneRow | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        model = self.method.drafter.draws_from
        if model is not None and (model.engine == "kernels" or model.dtype.itemsize > 2):
            self._drafter = OneRow(model, self.request)

    def see(
        self,
        text: list[int],
        rule: Acceptance,
        draft: Draft,
        logits: Float[Tensor, "n+1 vocab"],
        verdict: Verdict,
    ) -> None:
        """One round."""
        places = visited(text, verdict, self.request)
        if not drawn_as_declared(draft):
            self.wrong_draws.append(places[0][0])
        law = self._law(text, rule, draft, logits.double(), [row for _, row in places])
        rows = len(draft) + 1 + (0 if draft.probes is None else len(draft.probes))
        for position, row in places:
            used = logits[row].clone()  # a compiled step reuses its memory
            self.contexts.append(Context(position, rows, used, None if law is None else law[row]))

    def _law(
        self, text: list[int], rule: Acceptance, draft: Draft, logits: Float[Tensor, "n+1 vocab"], rows: Sequence[int]
    ) -> Float[Tensor, "n+1 vocab"] | None:
        if not isinstance(rule, HasLaw):
            return None
        held = {name: getattr(draft, name) for name in ("probs", "own_probs")}
        draft = replace(draft, **{name: exactly(probs) for name, probs in held.items() if probs is not None})
        drawn = drafter_probs(draft, logits)
        drawn = drawn / drawn.sum(-1, keepdim=True)
        if self._drafter is not None and draft.probs is not None:
            drawn = self._really_drawn(text, draft, drawn, rows)
        return rule.law(draft, logits, self.request, drawn)

    def _really_drawn(
        self, text: list[int], draft: Draft, declared: Float[Tensor, "n vocab"], rows: Sequence[int]
    ) -> Float[Tensor, "n vocab"]:
        """q of the first child of each visited row by the drafter's model; later siblings as declared."""
        drawn, children, tokens = declared.clone(), judged_nodes(draft), list(text)
        for row in rows:
            if row:
                tokens.append(draft.token_list[row - 1])
            if children[row]:
                first = children[row][0]
                real = distribution(self.request.sampling, self._drafter.behind(tokens))
                real = as_wide_as(declared, real[None])[0]
                if total_variation(real, declared[first]) > REDRAWN:
                    drawn[first] = real
        return drawn


def exactly(probs: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Distributions in float64, without the rounding of a sum in float32. What sums to something else stays."""
    probs = probs.double()
    total = probs.sum(-1, keepdim=True)
    return torch.where((total - 1).abs() < NORMALIZED, probs / total, probs)


def drawn_as_declared(draft: Draft) -> bool:
    """Whether each token is the one that its random number picks from its row of q; True if no numbers are given."""
    if draft.uniforms is None or draft.probs is None or not len(draft):
        return True
    probs = draft.probs.double()
    probs, drawn = probs / probs.sum(-1, keepdim=True), draft.tokens[:, None]
    reached = probs.cumsum(-1).gather(-1, drawn)[:, 0]
    before = reached - probs.gather(-1, drawn)[:, 0]
    uniforms = draft.uniforms.to(reached)
    return bool(((before - DRAWN <= uniforms) & (uniforms <= reached + DRAWN)).all())
