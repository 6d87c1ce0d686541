"""Rules of tokens that are likely enough: typical acceptance, MARS, and truncation sampling as
their control.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import (
    SpeculativeRule,
    acceptance,
    drafter_probs,
    judged_probs,
    residual,
    try_siblings,
)
from bild_lab.engine.methods.speculative.tree_acceptance import (
    PerNode,
    PerRow,
    accepted_path,
    judging_rows,
    output_of_threshold,
    output_of_trials,
)
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, draw, precise
from bild_lab.errors import UserError, require_number, require_whole


class TypicalAcceptance(Acceptance):
    """Accept a token with p(token) > min(ε, δ · exp(−H(p))), where H is the entropy of p in nats
    (Medusa §2.3).

    In a tree the longest path of such tokens is accepted; among equally long paths, the most
    likely. Medusa accepts the first token of its candidates unconditionally, so that every round
    emits something. Here that token is `next_token`, the target's own choice. It is drawn from p,
    where Medusa takes the argmax.

    p is standardized by the request's sampling settings. Under greedy decoding p(token) and H(p)
    are taken at temperature 1. Medusa uses exact match there: use ExactMatch for that.

    epsilon: a token more probable than this is always accepted. delta: scales the threshold, which
    falls as the target's entropy grows.
    """

    accepts_trees = True

    def __init__(self, epsilon: float, delta: float) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            require_share(f"typical acceptance's {name}", value, "smaller accepts more")
        self._epsilon, self._delta = epsilon, delta

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        sampling = request.sampling
        p = judged_probs(logits, sampling)  # [n+1, vocab]
        rows = judging_rows(draft)  # [n]
        choice = sampling.choose(logits, None) if sampling.greedy else draw(p, request.generator)
        likelihood = p[rows, draft.tokens]
        threshold = typical_threshold(p, self._epsilon, self._delta)[rows]
        probs, passing, target_tokens = draft.to_host(likelihood, likelihood > threshold, choice)
        path = longest_path(draft.parent_list, probs, passing)
        last_row = path[-1] + 1 if path else 0
        return Verdict(path=path, next_token=int(target_tokens[last_row]))

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow | None:
        p = request.sampling.probs(logits)
        return output_of_threshold(
            p > typical_threshold(p, self._epsilon, self._delta)[:, None], draft, p, proposal_probs
        )


def longest_path(parents: list[int], probs: list[float], passes: list[float]) -> tuple[int, ...]:
    """The longest path from the root over nodes that pass; among equally long paths, the most
    probable.
    """
    path_to: dict[int, tuple[int, ...]] = {ROOT: ()}
    likelihoods = {path_to[ROOT]: 1.0}
    for node, parent in enumerate(parents):
        if passes[node] and parent in path_to:
            path_to[node] = (*path_to[parent], node)
            likelihoods[path_to[node]] = likelihoods[path_to[parent]] * probs[node]
    return max(likelihoods, key=lambda path: (len(path), likelihoods[path]))


class TruncationSampling(SpeculativeRule):
    """Draw from the target's distribution without the tokens that a lossy rule could never accept.

    A rule that accepts whatever the target finds likely enough also makes the text colder, and so
    may score better. The control is the target alone, drawing from p over the tokens that the rule
    would accept, normalized: a gain that it has too is not the drafter's. Tokens stay that satisfy
    all conditions given; the most likely token always stays.

    epsilon, delta: p(token) > min(ε, δ exp(−H(p))), what typical acceptance accepts (η-sampling,
        Hewitt et al., 2022).
    ratio: p(token) >= ratio · max p, what greedy lenience accepts (min-p).
    top_k: at most so many tokens are as likely or more likely.
    rollback: −log p(token) <= rollback in nats, what BiLD accepts, with p at temperature 1;
        elsewhere it is as sampled.

    Drafts are verified by speculative sampling towards the truncated distribution, so a drafter
    does not change it; the policy has none. Under greedy decoding the most likely token stays, and
    the text is the target's own.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        ratio: float | None = None,
        top_k: int | None = None,
        rollback: float | None = None,
    ) -> None:
        if (epsilon is None) != (delta is None):
            raise UserError(
                f"truncation takes epsilon and delta together, got {epsilon!r} and {delta!r}"
            )
        if all(value is None for value in (epsilon, ratio, top_k, rollback)):
            raise UserError(
                "truncation needs a bar, got none; set ratio, top_k, rollback, or epsilon and delta"
            )
        for name, value in (("epsilon", epsilon), ("delta", delta), ("ratio", ratio)):
            if value is not None:
                require_share(f"truncation's {name}", value, "smaller keeps more tokens")
        if top_k is not None:
            require_whole("truncation's top_k", top_k, 1)
        if rollback is not None:
            require_number(
                "truncation's rollback",
                rollback,
                0,
                float("inf"),
                above=True,
                remedy="larger keeps more",
            )
        self._epsilon = epsilon
        self._delta = delta
        self._ratio = ratio
        self._top_k = top_k
        self._rollback = rollback

    def lossless(self, sampling: Sampling) -> bool:
        return sampling.greedy

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        if request.sampling.greedy:
            return ExactMatch()(draft, logits, request)
        return super().__call__(draft, logits, request)

    def distributions(
        self, draft: Draft, logits: PerRow, request: Request
    ) -> tuple[PerRow, PerNode]:
        p = self.probs(logits, request.sampling)
        return p, drafter_probs(draft, p)

    def probs(
        self, logits: Float[Tensor, "n vocab"], sampling: Sampling
    ) -> Float[Tensor, "n vocab"]:
        """The truncated distribution."""
        p = sampling.probs(logits)
        left = p * self._allowed(p, precise(logits))
        return left / left.sum(-1, keepdim=True)

    def _allowed(self, p: PerNode, logits: Float[Tensor, "n vocab"]) -> Bool[Tensor, "n vocab"]:
        best = p.amax(-1, keepdim=True)
        allowed = torch.ones_like(p, dtype=torch.bool)
        if self._epsilon is not None:
            allowed &= p > typical_threshold(p, self._epsilon, self._delta)[:, None]
        if self._ratio is not None:
            allowed &= p >= self._ratio * best
        if self._top_k is not None:
            allowed &= among_most_likely(p, self._top_k)
        if self._rollback is not None:
            allowed &= logits.log_softmax(-1) >= -self._rollback
        return allowed | (p == best)


class MarginAcceptance(Acceptance):
    """Also accept one of the target's two most likely tokens where the second's logit is above θ
    times the first's.

    MARS, Song et al., 2026, arXiv 2601.15498; `evaluate_posterior` in mars/model/utils.py of
    5SSjw/MARS. The ratio is of raw logits: a constant added to all changes it. Where the first is
    not positive nothing is forgiven. Other tokens are judged by lossless speculative sampling,
    where the released code, when it samples, rejects them. In a tree a token that lossless decoding
    keeps comes first, then the most likely that is forgiven.

    ratio: θ in (0, 1]; smaller accepts more, 1 is lossless.
    """

    accepts_trees = True

    def __init__(self, ratio: float) -> None:
        require_share("MARS's ratio", ratio, "smaller accepts more")
        self._ratio = ratio

    def lossless(self, sampling: Sampling) -> bool:
        return self._ratio == 1

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        """The round's statistics say of each node whether it was `forgiven`: accepted, where lossless
        decoding rejects it.
        """
        sampling, rows = request.sampling, judging_rows(draft)
        p = judged_probs(logits, sampling)
        if sampling.greedy:
            emitted = sampling.choose(logits, None)
            accepted = draft.tokens == emitted[rows]
        else:
            q = drafter_probs(draft, p)
            accepted, next_token_probs = try_siblings(p, q, draft, request.generator)
            emitted = draw(next_token_probs, request.generator)
        near, likelihood = self._near(p, logits)[rows, draft.tokens], p[rows, draft.tokens]
        accepted, near, likelihood, emitted = draft.to_host(accepted, near, likelihood, emitted)

        def choose(siblings: list[int]) -> int | None:
            for node in siblings:
                if accepted[node]:
                    return node
            forgiven = [node for node in siblings if near[node]]
            return max(forgiven, key=likelihood.__getitem__, default=None)

        path, row = accepted_path(draft, choose)
        flags = tuple(int(node in path and not accepted[node]) for node in range(len(draft)))
        return Verdict(path, int(emitted[row]), stats={"forgiven": flags})

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow | None:
        if draft.parents is not None:  # forgiven siblings compete
            return None
        p = request.sampling.probs(logits)
        q, near = drafter_probs(draft, p), self._near(p, logits)

        def judge(left: Tensor, node: int) -> tuple[Tensor, Tensor]:
            return torch.where(near[node], 1.0, acceptance(left, q[node])), residual(left, q[node])

        return output_of_trials(judge, draft, p, proposal_probs)

    def _near(self, p: PerNode, logits: PerNode) -> Bool[Tensor, "n vocab"]:
        first_logit, second_logit = precise(logits).topk(2, dim=-1).values.split(1, dim=-1)
        return (
            among_most_likely(p, 2) & (first_logit > 0) & (second_logit > self._ratio * first_logit)
        )


def require_share(name: str, value: float, remedy: str) -> None:
    """Raise UserError unless a rule's number lies in (0, 1]."""
    require_number(name, value, 0, 1, above=True, remedy=remedy)


def typical_threshold(p: PerNode, epsilon: float, delta: float) -> Float[Tensor, " n"]:
    """min(ε, δ · exp(−H(p))) of each row."""
    entropy = torch.special.entr(p).sum(-1)  # nats; a token with probability 0 adds nothing
    return (delta * (-entropy).exp()).clamp(max=epsilon)


def among_most_likely(p: PerNode, top_k: int) -> Bool[Tensor, "n vocab"]:
    """Whether at most `top_k` tokens, this one among them, are as likely.

    Of equals that do not all fit, none is.
    """
    if top_k >= p.shape[-1]:
        return torch.ones_like(p, dtype=torch.bool)
    return p > p.topk(top_k + 1, dim=-1).values[..., -1:]
