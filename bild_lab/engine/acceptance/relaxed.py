"""Relaxed acceptance: tokens near the target's best are accepted, by a ratio, in a marked span, or by a margin."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import (
    acceptance,
    drafter_probs,
    forgiving_verdict,
    judged_probs,
    own_decisions,
    residual,
)
from bild_lab.engine.acceptance.trees import PerNode, PerRow, judging_rows, output_by
from bild_lab.engine.acceptance.typical import among_most_likely
from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.engine.session import LoadedModel, Scores
from bild_lab.errors import UserError, require_number, require_whole


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
        """The same for the token after the text, and after each drafted token in its own branch."""
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
    known, ids = target.checkpoint.tokenizer.get_vocab(), []
    for knob, piece in (("span_start", start), ("span_end", end)):
        if not isinstance(piece, str) or piece not in known:
            raise UserError(
                f"policy.{knob} must be one token of the target's vocabulary, such as <think>, got {piece!r}; "
                "set both markers, or both to null"
            )
        ids.append(known[piece])
    return Span(*ids)


class RelaxedAcceptance(Acceptance):
    """Also accept a token among the target's `top_k` most likely that has p(token) >= ratio · max p.

    This is what serving engines call relaxed acceptance for a model's thinking (TensorRT-LLM's `relaxed_topk`, with a
    ratio instead of a difference as in vLLM #43184). Other tokens are judged by lossless speculative sampling, and so
    are all tokens outside the span. In a tree a token that lossless decoding keeps comes first, then the most likely
    that is forgiven.

    Sampled, a drafted token is accepted with probability 1 if it is near enough, else with min(1, p / q); after a
    rejection the next token is drawn from norm(max(0, p − q)). p is standardized by the request's sampling settings;
    under greedy decoding it is taken at temperature 1. (The engines relax greedy decoding only.)

    top_k: as many tokens at most are as likely or more likely. At 1 greedy decoding is lossless. ratio: in (0, 1];
    smaller accepts more. span: None relaxes everywhere.
    """

    accepts_trees = True

    def __init__(self, top_k: int, ratio: float, span: Span | None = None) -> None:
        require_whole("relaxed acceptance's top_k", top_k, 1)
        require_number("relaxed acceptance's ratio", ratio, 0, 1, above=True, remedy="smaller accepts more")
        self._top_k, self._ratio, self._span = top_k, ratio, span
        self._text: Sequence[int] = ()

    def lossless(self, sampling: Sampling) -> bool:
        return sampling.greedy and self._top_k == 1

    def in_round(self, tokens: Sequence[int], scores: Scores) -> Acceptance:
        """The rule after this text."""
        rule = copy(self)
        rule._text = tokens
        return rule

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        p, rows = judged_probs(logits, request.sampling), judging_rows(draft)
        own, emitted = own_decisions(draft, logits, request)
        near, likelihood = self._near(p, logits)[rows, draft.tokens], p[rows, draft.tokens]
        accepted, near, probs, chosen = draft.to_host(own, near, likelihood, emitted)
        relaxed = self._relaxed(draft)
        forgiven = [ok and relaxed[parent + 1] for ok, parent in zip(near, draft.parent_list, strict=True)]
        return forgiving_verdict(draft, accepted, forgiven, probs, chosen)

    def output_distribution(self, draft: Draft, logits: PerRow, request: Request, drawn: PerNode) -> PerRow | None:
        if draft.parents is not None:  # forgiven siblings compete
            return None
        p = request.sampling.probs(logits)
        q, relaxed = drafter_probs(draft, p), torch.tensor(self._relaxed(draft), device=p.device)
        near = self._near(p, logits) & relaxed[:, None]

        def judge(left: Tensor, node: int) -> tuple[Tensor, Tensor]:
            return torch.where(near[node], 1.0, acceptance(left, q[node])), residual(left, q[node])

        return output_by(judge, draft, p, drawn)

    def _near(self, p: PerNode, logits: PerNode) -> Bool[Tensor, "n vocab"]:
        return among_most_likely(p, self._top_k) & (p >= self._ratio * p.amax(-1, keepdim=True))

    def _relaxed(self, draft: Draft) -> list[bool]:
        """Of each row, whether the token after it is in the span."""
        return [True] * (len(draft) + 1) if self._span is None else self._span.rows(self._text, draft)


class MarginAcceptance(RelaxedAcceptance):
    """Also accept one of the target's two most likely tokens where the second's logit is above θ times the first's.

    MARS, Song et al., 2026, arXiv 2601.15498; `evaluate_posterior` in mars/model/utils.py of 5SSjw/MARS. The ratio is
    of raw logits: a constant added to all changes it. Where the first is not positive nothing is forgiven. Other tokens
    are judged by lossless speculative sampling, where the released code, when it samples, rejects them.

    ratio: θ in (0, 1]; smaller accepts more, 1 is lossless.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__(2, ratio)

    def lossless(self, sampling: Sampling) -> bool:
        return self._ratio == 1

    def _near(self, p: PerNode, logits: PerNode) -> Bool[Tensor, "n vocab"]:
        first, second = precise(logits).topk(2, dim=-1).values.split(1, dim=-1)
        return among_most_likely(p, 2) & (first > 0) & (second > self._ratio * first)
