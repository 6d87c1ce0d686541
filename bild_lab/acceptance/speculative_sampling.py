"""Speculative sampling: keep drafted tokens so that the output is distributed as the target's."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.acceptance.exact_match import ExactMatch
from bild_lab.draft import Draft, Verdict
from bild_lab.request import Request
from bild_lab.sampling import draw


class SpeculativeSampling:
    """Accept a token drawn from q with probability min(1, p / q) (speculative decoding, Algorithm 1).

    At the first rejection the next token is drawn from norm(max(0, p − q)); after a draft that was
    accepted whole, from p. With argmax sampling p and q are one-hot and this is exact match.
    """

    accepts_trees = False

    def __init__(self) -> None:
        self._greedy = ExactMatch()

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        if request.sampling.greedy:
            return self._greedy(draft, logits, request)
        generator = request.generator
        p = request.sampling.probs(logits)  # [n+1, vocab]
        q = drafter_probs(draft, p)  # [n, vocab]
        drafted = draft.tokens[:, None]
        uniform = torch.rand(len(draft), generator=generator, device=p.device, dtype=p.dtype)
        accepted = uniform * q.gather(-1, drafted)[:, 0] < p[:-1].gather(-1, drafted)[:, 0]
        kept = accepted.long().cumprod(0).sum(0, keepdim=True)  # [1], left on the device
        # nothing was drafted after a whole draft: q is 0 there, and p − q is p
        after = residual(p.index_select(0, kept), pad(q, (0, 0, 0, 1)).index_select(0, kept))
        (counted, chosen) = draft.to_host(kept, draw(after, generator))
        return Verdict(path=tuple(range(int(counted[0]))), next_token=int(chosen[0]))


def drafter_probs(draft: Draft, p: Float[Tensor, "n+1 vocab"]) -> Float[Tensor, "n vocab"]:
    """q as wide as p: one-hot for a drafter that is certain, padded where vocabularies are padded apart."""
    if draft.probs is not None:
        return pad(draft.probs.to(p), (0, p.shape[-1] - draft.probs.shape[-1]))
    return torch.zeros_like(p[:-1]).scatter_(-1, draft.tokens[:, None], 1.0)


def residual(p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """norm(max(0, p − q)) of each row; p itself where rounding leaves nothing of the difference."""
    difference = (p - q).clamp(min=0)
    total = difference.sum(-1, keepdim=True)
    return torch.where(total > 0, difference / total, p)
