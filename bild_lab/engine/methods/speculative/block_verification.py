"""Block verification: the draft is judged as a whole, which accepts more than token by token and
loses nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import (
    acceptance,
    drafted_probs,
    drafter_probs,
    residual,
    uniform_numbers,
)
from bild_lab.engine.methods.speculative.tree_acceptance import PerNode, PerRow, chain_verdict
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, draw


class BlockVerification(Acceptance):
    """Accept the longest prefix whose coin says so, not the tokens before the first failure (Sun et
    al., 2025, Alg. 2).

    With P_0 = 1 and P_i = min(1, P_{i−1} p(x_i) / q(x_i)), the prefix of i tokens is accepted with
    probability

        h_i = R_i / (R_i + 1 − P_i), where R_i = Σ_x max(0, P_i p(x | x_1 … x_i) − q(x | x_1 … x_i)),

    and the whole draft, after which there is no q, with h_n = P_n. The longest accepted prefix is
    kept. The next token is drawn from norm(max(0, P_i p − q)) after it, or from p after the whole
    draft.

    The text has the target's distribution: a prefix of i tokens or more is accepted with
    probability P_i. No rule that reads these probabilities accepts more tokens in expectation;
    speculative sampling accepts as many or fewer. Under greedy decoding p and q are one-hot and
    this is exact match.
    """

    def lossless(self, sampling: Sampling) -> bool:
        return True

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        if request.sampling.greedy or not len(draft):
            return ExactMatch()(draft, logits, request)
        p = request.sampling.probs(logits)  # [n+1, vocab]
        q = drafter_probs(draft, p)  # [n, vocab]
        weights = prefix_weights(p, q, draft)  # [n+1]
        scaled = weights[:-1, None] * p[:-1]
        chances = chances_to_end(scaled, q, weights[:-1])  # h_0 … h_{n−1}
        chances = torch.cat([chances[1:], weights[-1:]])  # h_1 … h_n
        uniforms = uniform_numbers(draft, p, request.generator)
        lengths = torch.arange(1, len(draft) + 1, device=p.device)
        accept_length = ((uniforms < chances) * lengths).amax(0, keepdim=True)
        next_token_probs = torch.cat([residual(scaled, q), p[-1:]])
        next_token_probs = next_token_probs.index_select(0, accept_length)
        return chain_verdict(draft, accept_length, draw(next_token_probs, request.generator))

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow:
        """Given that the prefix x_1 … x_i is kept.

        A token x follows as drafted with probability P_{i+1} = min(1, P_i p(x) / q(x)), as what is
        drafted after it is drawn from its q. Else the prefix ends there with probability h_i, and
        the residual follows.
        """
        p = request.sampling.probs(logits)
        q = drafter_probs(draft, p)
        weights = prefix_weights(p, q, draft)[:-1]  # [n]
        scaled = weights[:, None] * p[:-1]
        follows = proposal_probs * acceptance(scaled, q)
        followed = follows.sum(-1, keepdim=True)
        ends = (1 - followed) * chances_to_end(scaled, q, weights)[:, None]
        prefix_probs = followed + ends  # P_i if `proposal_probs` is q
        output = torch.where(
            prefix_probs == 0, p[:-1], (follows + ends * residual(scaled, q)) / prefix_probs
        )
        return torch.cat([output, p[-1:]])


def chances_to_end(
    scaled: PerNode, q: PerNode, weights: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """h_0 … h_{n−1}: how likely the draft ends after each prefix if it does not go on.

    scaled: P_i p after each prefix. weights: P_0 … P_{n−1}.
    """
    residual_mass = (scaled - q).clamp(min=0).sum(-1)  # R_0 … R_{n−1}
    total = residual_mass + 1 - weights
    # where both are 0 the drafter is as good as the target, and the longer prefix is kept anyway
    return torch.where(total > 0, residual_mass / total, 1.0)


def prefix_weights(p: PerRow, q: PerNode, draft: Draft) -> Float[Tensor, " n+1"]:
    """P_0 … P_n: how much of its target probability each prefix still has, after what was capped
    before.
    """
    ratios = drafted_probs(p[:-1], draft) / drafted_probs(q, draft)
    weight = torch.ones_like(ratios[:1])
    weights = [weight]
    for ratio in ratios.split(1):
        weight = (weight * ratio).clamp(max=1)
        weights.append(weight)
    return torch.cat(weights)
