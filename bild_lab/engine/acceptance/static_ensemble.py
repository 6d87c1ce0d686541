"""The static ensemble: speculative sampling towards a mixture of target and drafter."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import as_wide_as, drafter_probs, speculative_law, verify_chain
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, likeliest, precise
from bild_lab.errors import require_number


class StaticEnsemble:
    """Speculative sampling towards π = w p + (1 − w) q instead of the target's p (DIVERSED, Wang et al., 2026).

    The distribution of an emitted token is π, and a drafted token is accepted with probability
    Σ min(π, q) = 1 − TV(π, q) = 1 − w TV(p, q). Each round's statistics hold this as `expected_acceptance`, for every
    drafted token, so that the mean over the judged ones can be compared with the measured acceptance rate. After a
    fully accepted draft there is no drafter distribution, and the target chooses alone.

    Under greedy decoding the text is the ensemble's own: the token with the largest w p + (1 − w) q, of both models'
    distributions at temperature 1. There a drafted token is accepted or not, and no chance is recorded.

    weight: w in [0, 1]. At 1 the rule is lossless, at 0 every drafted token is accepted.
    """

    accepts_trees = False
    needs = frozenset({"own_probs"})

    def __init__(self, weight: float) -> None:
        require_number("a static ensemble's weight", weight, 0, 1, remedy="1 is the target alone, smaller accepts more")
        self._weight = weight

    def lossless(self, sampling: Sampling) -> bool:
        return self._weight == 1

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        n = len(draft)
        if request.sampling.greedy:
            return self._greedy(draft, logits)
        p = request.sampling.probs(logits)  # [n+1, vocab]
        q = drafter_probs(draft, p)  # [n, vocab]
        mixed = torch.cat([self._mixed(p[:n], q), p[n:]])
        expected = 1 - self._weight * (p[:n] - q).abs().sum(-1) / 2  # with the total variation of p and q
        return verify_chain(mixed, q, draft, request.generator, expected_acceptance=expected)

    def law(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request, drawn: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n+1 vocab"]:
        n, p = len(draft), request.sampling.probs(logits)
        q = drafter_probs(draft, p)
        return speculative_law(draft, torch.cat([self._mixed(p[:n], q), p[n:]]), q, drawn)

    def _greedy(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"]) -> Verdict:
        scores, n = precise(logits), len(draft)
        if n and self._weight < 1:
            p = scores[:n].softmax(-1)
            mixed = self._mixed(p, as_wide_as(p, draft.own_probs))
            chosen = torch.cat([likeliest(mixed), likeliest(scores[n:])])
        else:
            chosen = likeliest(scores)
        (chosen,) = draft.to_host(chosen)
        kept = next((place for place in range(n) if chosen[place] != draft.token_list[place]), n)
        return Verdict(tuple(range(kept)), int(chosen[kept]))

    def _mixed(self, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        return self._weight * p + (1 - self._weight) * q
