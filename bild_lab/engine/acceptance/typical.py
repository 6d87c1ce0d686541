"""Typical acceptance, Medusa's rule for tokens that are likely enough."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.acceptance.laws import passing_law
from bild_lab.engine.acceptance.trees import judging_rows
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, draw, precise
from bild_lab.errors import UserError


class TypicalAcceptance:
    """Accept a token with p(token) > min(ε, δ · exp(−H(p))), where H is the entropy of p in nats (Medusa §2.3).

    In a tree the longest path of such tokens is accepted; among equally long paths, the likeliest.
    Medusa accepts the first token of its candidates unconditionally, so that every round emits something.
    Here that token is `next_token`, the target's own choice. It is drawn from p, where Medusa takes the argmax.

    p is standardized by the request's sampling settings. Under greedy decoding p(token) and H(p) are taken
    at temperature 1. Medusa uses exact match there: use ExactMatch for that.

    epsilon: a token more probable than this is always accepted. delta: scales the threshold, which falls
    as the target's entropy grows.
    """

    accepts_trees = True
    needs: frozenset[str] = frozenset()

    def __init__(self, epsilon: float, delta: float) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
                raise UserError(f"typical acceptance's {name} must lie in (0, 1], got {value!r}; smaller accepts more")
        self._epsilon, self._delta = epsilon, delta

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        sampling = request.sampling
        if sampling.greedy:
            p, choice = precise(logits).softmax(-1), sampling.choose(logits, None)
        else:
            p = sampling.probs(logits)  # [n+1, vocab]
            choice = draw(p, request.generator)
        bar = self._bar(p)  # [n+1]
        rows = judging_rows(draft)
        likelihood = p[rows, draft.tokens]  # [n]
        probs, bars, chosen = draft.to_host(likelihood, bar[rows], choice)
        path = longest_path(draft.parent_list, probs, [prob > least for prob, least in zip(probs, bars, strict=True)])
        return Verdict(path=path, next_token=int(chosen[path[-1] + 1 if path else 0]))

    def law(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request, drawn: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n+1 vocab"] | None:
        p = request.sampling.probs(logits)
        return passing_law(draft, p, drawn, p > self._bar(p)[:, None])

    def _bar(self, p: Float[Tensor, "m vocab"]) -> Float[Tensor, " m"]:
        return (self._delta * (-entropy(p)).exp()).clamp(max=self._epsilon)


def entropy(p: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    """Entropy of each row in nats. A token with probability 0 adds nothing."""
    return torch.special.entr(p).sum(-1)


def longest_path(parents: list[int], probs: list[float], passes: list[bool]) -> tuple[int, ...]:
    """The longest path from the root over nodes that pass; among equally long paths, the most probable."""
    standing: dict[int, tuple[tuple[int, ...], float]] = {-1: ((), 1.0)}  # its path and likelihood, by node
    for node, parent in enumerate(parents):
        if passes[node] and parent in standing:
            path, likelihood = standing[parent]
            standing[node] = ((*path, node), likelihood * probs[node])
    best, _ = max(standing.values(), key=lambda item: (len(item[0]), item[1]))
    return best
