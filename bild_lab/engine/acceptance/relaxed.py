"""Relaxed acceptance: tokens near the target's best stand, everywhere or inside a marked span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.acceptance.forgiving import forgiving_verdict, judged_probs, own_decisions
from bild_lab.engine.acceptance.laws import acceptance, law_of
from bild_lab.engine.acceptance.speculative_sampling import drafter_probs, residual
from bild_lab.engine.acceptance.trees import judging_rows
from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import EVERYTHING, Scores, Want
from bild_lab.errors import UserError, require_number, require_whole

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel


@dataclass(frozen=True)
class Span:
    """A stretch of text between two tokens, such as a model's thinking. Without the second it has no end."""

    start: int
    end: int

    def inside(self, tokens: Sequence[int]) -> bool:
        """Whether the token after these belongs to the span. The token that ends it does."""
        last = next((token for token in reversed(tokens) if token in (self.start, self.end)), None)
        return last is not None and last == self.start

    def rows(self, tokens: Sequence[int], draft: Draft) -> list[bool]:
        """The same for the token after the text, and after each drafted token behind its own branch."""
        found = [self.inside(tokens)]
        for token, parent in zip(draft.token_list, draft.parent_list, strict=True):
            before = found[0 if parent == ROOT else parent + 1]
            found.append(token == self.start or (before and token != self.end))
        return found


def marked_span(target: LoadedModel, start: str | None, end: str | None) -> Span | None:
    """The span between two pieces of the target's vocabulary; None if both are null.

    Raises UserError for one marker without the other, and for one that is not a single token.
    """
    if start is None and end is None:
        return None
    tokenizer = target.checkpoint.tokenizer
    ids = []
    for knob, piece in (("span_start", start), ("span_end", end)):
        known = tokenizer.get_vocab()
        if not isinstance(piece, str) or piece not in known:
            raise UserError(
                f"policy.{knob} must be one token of the target's vocabulary, such as <think>, got {piece!r}; "
                "set both markers, or both to null"
            )
        ids.append(known[piece])
    return Span(*ids)


class RelaxedAcceptance:
    """Also accept a token among the target's `top_k` likeliest that has p(token) >= ratio · max p.

    This is what serving engines call relaxed acceptance for a model's thinking (TensorRT-LLM's `relaxed_topk`, with a
    ratio instead of a difference as in vLLM #43184). Other tokens are judged by lossless speculative sampling, and so
    are all tokens outside the span. In a tree a token that lossless decoding keeps comes first, then the likeliest
    that is forgiven.

    Sampled, a drafted token is accepted with probability 1 if it is near enough, else with min(1, p / q); after a
    rejection the next token is drawn from norm(max(0, p − q)). p is standardized by the request's sampling settings;
    under greedy decoding it is taken at temperature 1. (The engines relax greedy decoding only.)

    top_k: as many tokens at most are as likely or likelier. At 1 greedy decoding is lossless. ratio: in (0, 1]; smaller
    accepts more. span: None relaxes everywhere.
    """

    accepts_trees = True
    needs: frozenset[str] = frozenset()
    wants: Want = EVERYTHING

    def __init__(self, top_k: int, ratio: float, span: Span | None = None) -> None:
        require_whole("relaxed acceptance's top_k", top_k, 1)
        require_number("relaxed acceptance's ratio", ratio, 0, 1, above=True, remedy="smaller accepts more")
        self._top_k, self._ratio, self._span = top_k, ratio, span

    def lossless(self, sampling: Sampling) -> bool:
        return sampling.greedy and self._top_k == 1

    def in_round(self, tokens: Sequence[int], scores: Scores) -> Acceptance:
        """The rule behind this text."""
        return self if self._span is None else _Behind(self, self._span, tokens)

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        """Relaxed everywhere."""
        return self.verdict(draft, logits, request, lambda draft: [True] * (len(draft) + 1))

    def law(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request, drawn: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n+1 vocab"] | None:
        if draft.parents is not None or self._span is not None:  # forgiven siblings compete; a span hangs on the text
            return None
        p = request.sampling.probs(logits)
        q, likelier = drafter_probs(draft, p), p.sort(-1).values
        rank = p.shape[-1] - torch.searchsorted(likelier, p)  # how many tokens are as likely or likelier
        near = (rank <= self._top_k) & (p >= self._ratio * p.amax(-1, keepdim=True))

        def judge(owed: Tensor, node: int) -> tuple[Tensor, Tensor]:
            kept = torch.where(near[node], 1.0, acceptance(owed, q[node]))
            return kept, residual(owed[None], q[node][None])[0]

        return law_of(draft, p, drawn, judge)

    def verdict(
        self,
        draft: Draft,
        logits: Float[Tensor, "n+1 vocab"],
        request: Request,
        inside: Callable[[Draft], Sequence[bool]],
    ) -> Verdict:
        """inside: of each row, whether the token after it is in the span; reads the draft's tokens."""
        p, rows = judged_probs(logits, request.sampling), judging_rows(draft)
        likelihood = p[rows, draft.tokens]  # [n]
        rank = (p[rows] >= likelihood[:, None]).sum(-1)  # how many tokens are as likely or likelier
        near = (rank <= self._top_k) & (likelihood >= self._ratio * p.amax(-1)[rows])
        own, emitted = own_decisions(draft, logits, request)
        accepted, near, probs, chosen = draft.to_host(own, near, likelihood, emitted)
        within = inside(draft)
        forgiven = [bool(ok) and within[parent + 1] for ok, parent in zip(near, draft.parent_list, strict=True)]
        return forgiving_verdict(draft, accepted, forgiven, probs, chosen)


@dataclass(frozen=True)
class _Behind:
    """A relaxed rule for the text of one round."""

    rule: RelaxedAcceptance
    span: Span
    tokens: Sequence[int]

    accepts_trees = True
    needs: frozenset[str] = frozenset()

    def lossless(self, sampling: Sampling) -> bool:
        return self.rule.lossless(sampling)

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        return self.rule.verdict(draft, logits, request, lambda draft: self.span.rows(self.tokens, draft))
