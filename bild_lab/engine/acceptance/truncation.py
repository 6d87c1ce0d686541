"""Truncation sampling by the target itself: the control for rules that accept what the target finds likely enough."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bild_lab.engine.acceptance.exact_match import ExactMatch
from bild_lab.engine.acceptance.speculative_sampling import drafter_probs, speculative_law, verify_chain, verify_tree
from bild_lab.engine.acceptance.typical import entropy
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.errors import UserError, require_number, require_whole


class TruncationSampling:
    """Draw from the target's distribution without the tokens that a lossy rule could never accept.

    A rule that accepts whatever the target finds likely enough also makes the text colder, and so may score better. The
    control is the target alone, drawing from p over the tokens that the rule would accept, normalized: a gain that it
    has too is not the drafter's. Tokens stay that satisfy all conditions given; the likeliest token always stays.

    epsilon, delta: p(token) > min(ε, δ exp(−H(p))), what typical acceptance accepts (η-sampling, Hewitt et al., 2022).
    ratio: p(token) >= ratio · max p, what relaxed acceptance and greedy lenience accept (min-p).
    top_k: at most so many tokens are as likely or likelier, as in relaxed acceptance.
    rollback: −log p(token) <= rollback in nats, what BiLD accepts; p is the target's own there, at temperature 1.
    In the others p is standardized by the request's sampling settings.

    Drafts are verified by speculative sampling towards the truncated distribution, so a drafter changes no law; the
    policy has none. Under greedy decoding the likeliest token stays, and the text is the target's own.
    """

    accepts_trees = True
    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        ratio: float | None = None,
        top_k: int | None = None,
        rollback: float | None = None,
    ) -> None:
        if (epsilon is None) != (delta is None):
            raise UserError(f"truncation takes epsilon and delta together, got {epsilon!r} and {delta!r}")
        if all(value is None for value in (epsilon, ratio, top_k, rollback)):
            raise UserError("truncation needs a bar, got none; set ratio, top_k, rollback, or epsilon and delta")
        for name, value in (("epsilon", epsilon), ("delta", delta), ("ratio", ratio)):
            if value is not None:
                require_number(f"truncation's {name}", value, 0, 1, above=True, remedy="smaller keeps more tokens")
        if top_k is not None:
            require_whole("truncation's top_k", top_k, 1)
        if rollback is not None:
            require_number("truncation's rollback", rollback, 0, float("inf"), above=True, remedy="larger keeps more")
        self._epsilon, self._delta, self._ratio, self._top_k, self._rollback = epsilon, delta, ratio, top_k, rollback
        self._exact = ExactMatch()

    def lossless(self, sampling: Sampling) -> bool:
        return sampling.greedy

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        if request.sampling.greedy:
            return self._exact(draft, logits, request)
        p = self.probs(logits, request.sampling)
        verify = verify_chain if draft.parents is None else verify_tree
        return verify(p, drafter_probs(draft, p), draft, request.generator)

    def law(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request, drawn: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n+1 vocab"]:
        p = self.probs(logits, request.sampling)
        return speculative_law(draft, p, drafter_probs(draft, p), drawn)

    def probs(self, logits: Float[Tensor, "n vocab"], sampling: Sampling) -> Float[Tensor, "n vocab"]:
        """The truncated distribution."""
        p = sampling.probs(logits)
        left = p * self._allowed(p, precise(logits))
        return left / left.sum(-1, keepdim=True)

    def _allowed(self, p: Float[Tensor, "n vocab"], logits: Float[Tensor, "n vocab"]) -> Bool[Tensor, "n vocab"]:
        best = p.amax(-1, keepdim=True)
        allowed = torch.ones_like(p, dtype=torch.bool)
        if self._epsilon is not None:
            allowed &= p > (self._delta * (-entropy(p)).exp()).clamp(max=self._epsilon)[:, None]
        if self._ratio is not None:
            allowed &= p >= self._ratio * best
        if self._top_k is not None and self._top_k < p.shape[-1]:
            ordered = p.sort(-1, descending=True).values
            beyond = ordered[:, self._top_k : self._top_k + 1]  # the first that does not fit: its equals do not either
            allowed &= p > beyond
        if self._rollback is not None:
            allowed &= logits.log_softmax(-1) >= -self._rollback
        return allowed | (p == best)
