"""Speculative cascades: the drafter's tokens are kept unless a deferral rule asks for the target's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import as_wide_as, drafter_probs, speculative_law, verify_chain
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.errors import UserError


class Deferral(Protocol):
    """Says which of the drafter's tokens are deferred to the target.

    p and q are the models' own distributions, at temperature 1. A result with one column holds for every token of
    a position.
    """

    def __call__(self, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Bool[Tensor, " n #vocab"]: ...


@dataclass(frozen=True)
class Alpha:
    """How much more confident the target must be before a rule defers to it. A greater alpha defers less."""

    alpha: float

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not math.isfinite(self.alpha):
            raise UserError(f"a cascade's alpha must be a finite number, got {self.alpha!r}; greater defers less")


class Chow(Alpha):
    """Defer a position where max q < 1 − α: the drafter is unsure."""

    def __call__(self, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Bool[Tensor, "n 1"]:
        return greatest(q) < 1 - self.alpha


class Diff(Alpha):
    """Defer a position where max q < max p − α: the target is more confident."""

    def __call__(self, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Bool[Tensor, "n 1"]:
        return greatest(q) < greatest(p) - self.alpha


class Opt(Alpha):
    """Defer a position where max q < max p − α · D_TV(p, q): like Diff, but it accounts for the cost of rejections."""

    def __call__(self, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Bool[Tensor, "n 1"]:
        distance = (p - q).abs().sum(-1, keepdim=True) / 2  # total variation
        return greatest(q) < greatest(p) - self.alpha * distance


class TokenV1(Alpha):
    """Defer tokens with q(token) < max p − α."""

    def __call__(self, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Bool[Tensor, "n vocab"]:
        return q < greatest(p) - self.alpha


class TokenV2(Alpha):
    """Defer tokens with p(token) < max p − α."""

    def __call__(self, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Bool[Tensor, "n vocab"]:
        return p < greatest(p) - self.alpha


class TokenV3(Alpha):
    """Defer tokens with p(token) < (1 − α) · max p."""

    def __call__(self, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Bool[Tensor, "n vocab"]:
        return p < (1 - self.alpha) * greatest(p)


RULES: dict[str, type[Alpha]] = {
    "chow": Chow,
    "diff": Diff,
    "opt": Opt,
    "token_v1": TokenV1,
    "token_v2": TokenV2,
    "token_v3": TokenV3,
}


def deferral(rule: str, alpha: float) -> Deferral:
    """The deferral rule with this name. Raises UserError for an unknown name."""
    if rule not in RULES:
        raise UserError(f"a cascade's rule must be one of {', '.join(RULES)}, got {rule!r}")
    return RULES[rule](alpha)


class SpeculativeCascade:
    """Speculative sampling towards π instead of the target's p (Narasimhan et al., 2025).

    π(v) = q(v) (1 − r(v)) + p(v) Σ_u r(u) q(u), where r says which tokens the rule defers. If all tokens
    of a position are deferred, π is p; if none is, π is q.

    The rule reads the models' own distributions, at temperature 1. π mixes the distributions that tokens
    are chosen from. Under greedy decoding these are one-hot, and so is π: the drafter's argmax is kept
    unless it is deferred, and then the target's argmax replaces it. After a fully accepted draft there
    is no drafter distribution, and the target chooses alone.
    """

    accepts_trees = False
    needs = frozenset({"own_probs"})

    def __init__(self, rule: Deferral) -> None:
        if not callable(rule):
            raise UserError(f"a cascade's rule must be a part that defers, such as Opt(alpha=0.1), got {rule!r}")
        self._rule = rule

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        mixed, q = self._mixed(draft, logits, request)
        return verify_chain(mixed, q, draft, request.generator)

    def law(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request, drawn: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n+1 vocab"]:
        return speculative_law(draft, *self._mixed(draft, logits, request), drawn)

    def _mixed(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request
    ) -> tuple[Float[Tensor, "n+1 vocab"], Float[Tensor, "n vocab"]]:
        """π, which is p behind the whole draft, and q."""
        n = len(draft)
        p = request.sampling.probs(logits)  # [n+1, vocab]
        q = drafter_probs(draft, p)  # [n, vocab]
        if n == 0:
            return p, q
        own = precise(logits[:n]).softmax(-1)
        deferred = self._rule(own, as_wide_as(own, draft.own_probs))
        return torch.cat([cascaded(p[:n], q, deferred), p[n:]]), q


def cascaded(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"], deferred: Bool[Tensor, " n #vocab"]
) -> Float[Tensor, "n vocab"]:
    """π: q for tokens that are not deferred; the deferred probability mass is spread according to p."""
    return q * ~deferred + p * (q * deferred).sum(-1, keepdim=True)


def greatest(probs: Float[Tensor, "n vocab"]) -> Float[Tensor, "n 1"]:
    return probs.amax(-1, keepdim=True)
