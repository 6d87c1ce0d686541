"""Rejection sampling of drafted tokens, to compare speculative sampling with."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.sampling import (
    before_rejection,
    drafted_probs,
    drafter_probs,
    generator_of,
    uniform_numbers,
)
from bild_lab.engine.methods.speculative.tree_acceptance import (
    PerNode,
    PerRow,
    chain_verdict,
    output_of_trials,
)
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, draw


class RejectionSampling(Acceptance):
    """Accept a token drawn from q with probability p / (M q), M = max p / q (speculative decoding,
    A.2).

    The non-iterative version: at the first rejection the next token is drawn from p itself. A token
    is then emitted with probability p / M + (1 − 1 / M) p = p, so the output has the target's
    distribution. The acceptance rate is 1 / M; that of speculative sampling is Σ min(p, q) >= 1 /
    M. If the drafter gives probability 0 to a token that the target may emit, M is infinite and
    nothing is accepted. Under greedy decoding p and q are one-hot and this is exact match.
    """

    def lossless(self, sampling: Sampling) -> bool:
        return True

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        p = request.sampling.probs(logits)  # [n+1, vocab]
        q = drafter_probs(draft, p)  # [n, vocab]
        bound = max_ratio(p[:-1], q)  # M, [n]
        generator = generator_of(request)
        uniforms = uniform_numbers(draft, p, generator)
        accepted = uniforms * bound * drafted_probs(q, draft) < drafted_probs(p[:-1], draft)
        accept_length = before_rejection(accepted)
        next_token = draw(p.index_select(0, accept_length), generator)
        return chain_verdict(draft, accept_length, next_token)

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow:
        p = request.sampling.probs(logits)
        q = drafter_probs(draft, p)
        scaled = torch.where(q > 0, max_ratio(p[:-1], q)[:, None] * q, torch.inf)  # M·q
        return output_of_trials(
            lambda left, node: (left / scaled[node], left), draft, p, proposal_probs
        )


def max_ratio(p: PerNode, q: PerNode) -> Float[Tensor, " n"]:
    """M = max p / q of each row, over the tokens that the target may emit."""
    return torch.where(p > 0, p / q, 0.0).amax(-1)
