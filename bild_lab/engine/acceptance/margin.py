"""Acceptance by a margin: one of the target's two most likely tokens is accepted where their logits are close."""

from __future__ import annotations

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
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.errors import require_number


class MarginAcceptance(Acceptance):
    """Also accept one of the target's two most likely tokens where the second's logit is above θ times the first's.

    MARS, Song et al., 2026, arXiv 2601.15498; `evaluate_posterior` in mars/model/utils.py of 5SSjw/MARS. The ratio is
    of raw logits: a constant added to all changes it. Where the first is not positive nothing is forgiven. Other tokens
    are judged by lossless speculative sampling, where the released code, when it samples, rejects them. In a tree a
    token that lossless decoding keeps comes first, then the most likely that is forgiven.

    ratio: θ in (0, 1]; smaller accepts more, 1 is lossless.
    """

    accepts_trees = True

    def __init__(self, ratio: float) -> None:
        require_number("MARS's ratio", ratio, 0, 1, above=True, remedy="smaller accepts more")
        self._ratio = ratio

    def lossless(self, sampling: Sampling) -> bool:
        return self._ratio == 1

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        p, rows = judged_probs(logits, request.sampling), judging_rows(draft)
        own, emitted = own_decisions(draft, logits, request)
        near, likelihood = self._near(p, logits)[rows, draft.tokens], p[rows, draft.tokens]
        return forgiving_verdict(draft, *draft.to_host(own, near, likelihood, emitted))

    def output_distribution(self, draft: Draft, logits: PerRow, request: Request, drawn: PerNode) -> PerRow | None:
        if draft.parents is not None:  # forgiven siblings compete
            return None
        p = request.sampling.probs(logits)
        q, near = drafter_probs(draft, p), self._near(p, logits)

        def judge(left: Tensor, node: int) -> tuple[Tensor, Tensor]:
            return torch.where(near[node], 1.0, acceptance(left, q[node])), residual(left, q[node])

        return output_by(judge, draft, p, drawn)

    def _near(self, p: PerNode, logits: PerNode) -> Bool[Tensor, "n vocab"]:
        first, second = precise(logits).topk(2, dim=-1).values.split(1, dim=-1)
        return among_most_likely(p, 2) & (first > 0) & (second > self._ratio * first)
