"""Speculative sampling towards another distribution than the target's: cascades, the static
ensemble and Cactus.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import (
    SpeculativeRule,
    drafter_probs,
    padded_like,
    verify_chain,
)
from bild_lab.engine.methods.speculative.tree_acceptance import (
    PerNode,
    PerRow,
    first_accepted,
    tree_verdict,
)
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, most_likely, precise
from bild_lab.errors import require_choice, require_finite, require_number


def max_prob(probs: PerNode) -> Float[Tensor, "n 1"]:
    return probs.amax(-1, keepdim=True)


def total_variation(p: PerNode, q: PerNode) -> Float[Tensor, "n 1"]:
    """The total variation of each row."""
    return (p - q).abs().sum(-1, keepdim=True) / 2


# Which of the drafter's tokens are deferred to the target, by p and q, the models' own
# distributions at temperature 1, and α: how much more confident the target must be. The first three
# defer whole positions, which have one column.
DEFERRALS: dict[str, Callable[[PerNode, PerNode, float], Bool[Tensor, " n #vocab"]]] = {
    "chow": lambda p, q, alpha: max_prob(q) < 1 - alpha,  # the drafter is unsure
    "diff": lambda p, q, alpha: max_prob(q) < max_prob(p) - alpha,  # the target is more confident
    # accounts for rejections
    "opt": lambda p, q, alpha: max_prob(q) < max_prob(p) - alpha * total_variation(p, q),
    "token_v1": lambda p, q, alpha: q < max_prob(p) - alpha,
    "token_v2": lambda p, q, alpha: p < max_prob(p) - alpha,
    "token_v3": lambda p, q, alpha: p < (1 - alpha) * max_prob(p),
}


class SpeculativeCascade(SpeculativeRule):
    """Speculative sampling towards π instead of the target's p (Narasimhan et al., 2025).

    π(v) = q(v) (1 − r(v)) + p(v) Σ_u r(u) q(u), where r says which tokens the rule defers. If all
    tokens of a position are deferred, π is p; if none is, π is q.

    The rule reads the models' own distributions, at temperature 1. π mixes the distributions that
    tokens are chosen from. Under greedy decoding these are one-hot, and so is π: the drafter's
    argmax is kept unless it is deferred, and then the target's argmax replaces it. After a fully
    accepted draft there is no drafter distribution, and the target chooses alone.

    rule: one of `DEFERRALS`. alpha: finite; a greater one defers less.
    """

    accepts_trees = False
    needs = frozenset({"unscaled_probs"})

    def __init__(self, rule: str, alpha: float) -> None:
        require_choice("a cascade's rule", rule, DEFERRALS)
        require_finite("a cascade's alpha", alpha, remedy="greater defers less")
        self._defers, self._alpha = DEFERRALS[rule], alpha

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def distributions(
        self, draft: Draft, logits: PerRow, request: Request
    ) -> tuple[PerRow, PerNode]:
        n = len(draft)
        p = request.sampling.probs(logits)
        q = drafter_probs(draft, p)
        if n == 0:
            return p, q
        target_probs = precise(logits[:n]).softmax(-1)
        deferred = self._defers(
            target_probs, padded_like(target_probs, draft.unscaled_probs), self._alpha
        )
        return torch.cat([cascaded(p[:n], q, deferred), p[n:]]), q


def cascaded(p: PerNode, q: PerNode, deferred: Bool[Tensor, " n #vocab"]) -> PerNode:
    """π: q for tokens that are not deferred; the deferred probability mass is spread according to
    p.
    """
    return q * ~deferred + p * (q * deferred).sum(-1, keepdim=True)


class StaticEnsemble(SpeculativeRule):
    """Speculative sampling towards π = w p + (1 − w) q instead of the target's p (DIVERSED, Wang et
    al., 2026).

    The distribution of an emitted token is π, and a drafted token is accepted with probability Σ
    min(π, q) = 1 − TV(π, q) = 1 − w TV(p, q). Each round's statistics hold this as
    `expected_acceptance`, for every drafted token, so that the mean over the judged ones can be
    compared with the measured acceptance rate. After a fully accepted draft there is no drafter
    distribution, and the target chooses alone.

    Under greedy decoding the text is the ensemble's own: the token with the largest w p + (1 − w)
    q, of both models' distributions at temperature 1. There a drafted token is accepted or not, and
    no chance is recorded.

    weight: w in [0, 1]. At 1 the rule is lossless, at 0 every drafted token is accepted.
    """

    accepts_trees = False
    needs = frozenset({"unscaled_probs"})

    def __init__(self, weight: float) -> None:
        require_number(
            "a static ensemble's weight",
            weight,
            0,
            1,
            remedy="1 is the target alone, smaller accepts more",
        )
        self._weight = weight

    def lossless(self, sampling: Sampling) -> bool:
        return self._weight == 1

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        if request.sampling.greedy:
            return self._greedy(draft, logits)
        mixed, q = self.distributions(draft, logits, request)
        expected = 1 - total_variation(mixed[:-1], q)[:, 0]
        return verify_chain(mixed, q, draft, request.generator, expected_acceptance=expected)

    def distributions(
        self, draft: Draft, logits: PerRow, request: Request
    ) -> tuple[PerRow, PerNode]:
        p = request.sampling.probs(logits)
        q = drafter_probs(draft, p)
        return torch.cat([self._mixed(p[:-1], q), p[-1:]]), q

    def _greedy(self, draft: Draft, logits: PerRow) -> Verdict:
        scores = precise(logits)
        n = len(draft)
        ensemble_tokens = most_likely(scores)
        if n and self._weight < 1:
            p = scores[:n].softmax(-1)
            ensemble_tokens[:n] = most_likely(self._mixed(p, padded_like(p, draft.unscaled_probs)))
        (emitted,) = draft.to_host(ensemble_tokens)
        agrees = [token == emitted[place] for place, token in enumerate(draft.token_list)]
        return tree_verdict(draft, first_accepted(agrees), emitted)

    def _mixed(self, p: PerNode, q: PerNode) -> PerNode:
        return self._weight * p + (1 - self._weight) * q


class Cactus(SpeculativeRule):
    """Speculative sampling towards h: the target's p with more of what was drafted, within a
    divergence (Cactus).

    Hao and Mou, 2026, arXiv 2604.04987, Theorem 2 and Corollary 5; `solve_constraint` in
    cactus/cactus.py of MANGA-UOFA/Cactus. For a drafted token x, h(x) = min(p(x) + √(2 δ p(x) (1 −
    p(x))), 1), and the others share the rest as in p. Where h(x) <= 1/2 the divergence of h from p
    is at most δ, in nats. As h depends on what was drafted, what is emitted has no closed form.
    After a fully accepted draft the target chooses alone.

    Under greedy decoding the paper's rule is exact match. Here x is then accepted if it is the most
    likely token of h, for p at temperature 1.

    delta: δ >= 0, in nats; 0 is lossless, larger accepts more.
    """

    accepts_trees = False

    def __init__(self, delta: float) -> None:
        require_finite("Cactus's delta", delta, 0, remedy="0 is lossless, larger accepts more")
        self._delta = delta

    def lossless(self, sampling: Sampling) -> bool:
        return self._delta == 0

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        if not request.sampling.greedy:
            return super().__call__(draft, logits, request)
        if self._delta == 0 or not len(draft):
            return ExactMatch()(draft, logits, request)
        raised = self._raised(precise(logits).softmax(-1), draft)
        accepted = most_likely(raised) == draft.tokens
        accepted_flags, target_tokens = draft.to_host(
            accepted.to(raised), most_likely(precise(logits))
        )
        return tree_verdict(draft, first_accepted(accepted_flags), target_tokens)

    def distributions(
        self, draft: Draft, logits: PerRow, request: Request
    ) -> tuple[PerRow, PerNode]:
        p = request.sampling.probs(logits)
        return torch.cat([self._raised(p, draft), p[-1:]]), drafter_probs(draft, p)

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> None:
        """It differs from token to token of the draft."""

    def _raised(self, p: PerRow, draft: Draft) -> PerNode:
        """h for each drafted token."""
        p = p[:-1]
        drafted = draft.tokens[:, None]
        probs = p.gather(-1, drafted)  # [n, 1], p(x)
        increase = (2 * self._delta * probs * (1 - probs)).sqrt()
        raised = (probs + increase).clamp(max=1.0)  # h(x)
        scale = torch.where(probs < 1, (1 - raised) / (1 - probs), 0.0)  # scales the other tokens
        return (scale * p).scatter(-1, drafted, raised)
