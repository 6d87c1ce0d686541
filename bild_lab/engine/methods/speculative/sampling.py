"""Speculative sampling: keep drafted tokens so that the output has the target's distribution, or
another one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.tree_acceptance import (
    PerNode,
    PerRow,
    best_sibling,
    chain_verdict,
    first_accepted,
    judged_nodes,
    judging_rows,
    output_of_trials,
    tree_verdict,
)
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, draw, one_hot, precise
from bild_lab.errors import require_number


class SpeculativeRule(Acceptance):
    """Accept a token drawn from q with probability min(1, π / q), else draw from norm(max(0, π −
    q)).

    What is emitted has the distribution π, whatever q is, as long as q is what the tokens were
    drawn from.
    """

    accepts_trees = True

    @abstractmethod
    def distributions(
        self, draft: Draft, logits: PerRow, request: Request
    ) -> tuple[PerRow, PerNode]:
        """π after each row, and q of each node."""

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        verify = verify_chain if draft.parents is None else verify_tree
        return verify(*self.distributions(draft, logits, request), draft, generator_of(request))

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow:
        p, q = self.distributions(draft, logits, request)

        def judge(remaining: Tensor, node: int) -> tuple[Tensor, Tensor]:
            return acceptance(remaining, q[node]), residual(remaining, q[node])

        return output_of_trials(judge, draft, p, proposal_probs)


class SpeculativeSampling(SpeculativeRule):
    """Accept a token drawn from q with probability min(1, p / (l q)) (speculative decoding,
    Algorithm 1, A.5).

    At the first rejection the next token is drawn from norm(max(0, p − l q)). After a fully
    accepted draft it is drawn from p. In a tree the children of a node are tried in the order
    drafted; after a rejected child its residual replaces p for the next child.

    lenience: l in (0, 1]. At 1 the output has the target's distribution. This also holds for trees
    whose siblings were drawn one after another from their rows of `draft.probs`. Below 1 no token
    is emitted with a probability above p / l.

    Under greedy decoding this is exact match. With lenience below 1 a token is then accepted if
    p(token) >= l · max p, p at temperature 1 before standardizing. If several siblings pass, the
    one most likely under p is taken.
    """

    def __init__(self, lenience: float = 1.0) -> None:
        require_number("lenience", lenience, 0, 1, above=True, remedy="use 1 for lossless decoding")
        self._lenience = lenience

    def lossless(self, sampling: Sampling) -> bool:
        return self._lenience == 1.0

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        if not request.sampling.greedy:
            return super().__call__(draft, logits, request)
        if self._lenience == 1.0:
            return ExactMatch()(draft, logits, request)
        logits, rows = precise(logits), judging_rows(draft)
        # log(p(token) / max p): the normalizer of p cancels
        below = logits[rows, draft.tokens] - logits.amax(-1)[rows]  # [n]
        gaps, target_tokens = draft.to_host(
            below, request.sampling.choose(logits, request.generator)
        )
        return tree_verdict(draft, best_sibling(gaps, math.log(self._lenience)), target_tokens)

    def distributions(
        self, draft: Draft, logits: PerRow, request: Request
    ) -> tuple[PerRow, PerNode]:
        p = request.sampling.probs(logits)
        return p, self._lenience * drafter_probs(draft, p)


class OverlapMeasurement(Acceptance):
    """The target decodes alone, and each round records how likely speculative sampling would accept
    the draft.

    `expected_acceptance` of each drafted token is β = Σ min(p, q), both standardized by the
    request's sampling, one-hot if greedy. Its mean over the target's own tokens is α (speculative
    decoding, Corollary 3.6, Table 3).
    """

    def lossless(self, sampling: Sampling) -> bool:
        return True

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        p = request.sampling.probs(logits)
        overlap = torch.minimum(p[:-1], drafter_probs(draft, p)).sum(-1)
        choice = request.sampling.choose(logits[:1], request.generator)
        next_token, overlaps = draft.to_host(choice, overlap)
        return Verdict((), int(next_token[0]), stats={"expected_acceptance": tuple(overlaps)})

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow:
        return request.sampling.probs(logits)  # whatever was drafted


def verify_chain(
    p: PerRow,
    q: PerNode,
    draft: Draft,
    generator: torch.Generator | None,
    **statistics: Float[Tensor, " n"],
) -> Verdict:
    """Accept each token with min(1, p / q) up to the first rejection, then draw from norm(max(0, p
    − q)).

    q is the drafter's distribution times the lenience. statistics: of each drafted token, by name.
    """
    uniforms = uniform_numbers(draft, p, generator)
    accepted = uniforms * drafted_probs(q, draft) < drafted_probs(p[:-1], draft)
    accept_length = before_rejection(accepted)
    # after a fully accepted draft there is no q: it is padded with 0, so p − q is p
    padded_q = pad(q, (0, 0, 0, 1))
    next_token_probs = residual(
        p.index_select(0, accept_length), padded_q.index_select(0, accept_length)
    )
    return chain_verdict(draft, accept_length, draw(next_token_probs, generator), **statistics)


def verify_tree(p: PerRow, q: PerNode, draft: Draft, generator: torch.Generator | None) -> Verdict:
    """`verify_chain` for a tree, from the root down: each sibling is tried against the residual of
    those before it.

    The residuals do not depend on the random draws. So all rows are computed at once on the device,
    and the accepted path is found on the host.
    """
    accepted, next_token_probs = try_siblings(p, q, draft, generator)
    flags, target_tokens = draft.to_host(accepted, draw(next_token_probs, generator))
    return tree_verdict(draft, first_accepted(flags), target_tokens)


def try_siblings(
    p: PerRow, q: PerNode, draft: Draft, generator: torch.Generator | None
) -> tuple[Bool[Tensor, " n"], PerRow]:
    """Which nodes are accepted if the siblings before them are not, and what is drawn from after
    each row if none is.

    A chain is a tree without siblings.
    """
    rows = judging_rows(draft)
    max_siblings = max(map(len, judged_nodes(draft)))  # the host needs this number
    uniforms = uniform_numbers(draft, p, generator)
    thresholds = uniforms * drafted_probs(q, draft)  # [n]
    padded_q = pad(q, (0, 0, 0, 1))  # index n, which means no further child, has q = 0
    accepted = torch.zeros_like(thresholds, dtype=torch.bool)
    node_indices = torch.arange(len(draft), device=p.device)
    remaining = p
    # children: [n+1], the first child of every row, then the second, …
    for children in sibling_table(rows, max_siblings):
        is_tried = children[rows] == node_indices
        accepted |= is_tried & (thresholds < remaining[rows, draft.tokens])
        remaining = residual(remaining, padded_q[children])
    return accepted, remaining


def sibling_table(rows: Int[Tensor, " n"], max_siblings: int) -> Int[Tensor, "siblings n+1"]:
    """Entry [i, row] is the (i + 1)-th child of this row, or n if it has none. max_siblings: the most
    children of any row.
    """
    n = rows.shape[0]
    is_sibling = rows == rows[:, None]
    earlier_siblings = is_sibling.tril(-1).sum(-1)  # [n]
    table = rows.new_full((max_siblings, n + 1), n)
    table[earlier_siblings, rows] = torch.arange(n, device=rows.device)
    return table


def before_rejection(accepted: Bool[Tensor, " n"]) -> Int[Tensor, " 1"]:
    """How many tokens of a chain come before the first rejection.

    The result stays on the device.
    """
    return accepted.long().cumprod(0).sum(0, keepdim=True)


def generator_of(request: Request) -> torch.Generator | None:
    """What draws for a request. The draws of a greedy one are all certain, and those of the process
    stay as they are.
    """
    if request.sampling.greedy and request.generator is None:
        return _for_certain_draws(request.source.device)
    return request.generator


@lru_cache(maxsize=8)
def _for_certain_draws(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def uniform_numbers(
    draft: Draft, p: PerRow, generator: torch.Generator | None
) -> Float[Tensor, " n"]:
    """A random number in [0, 1) for each node, in the precision and on the device of p."""
    return torch.rand(len(draft), generator=generator, device=p.device, dtype=p.dtype)


def drafted_probs(probs: PerNode, draft: Draft) -> Float[Tensor, " n"]:
    """The probability of each drafted token in its row."""
    return probs.gather(-1, draft.tokens[:, None])[:, 0]


def drafter_probs(draft: Draft, p: PerRow) -> PerNode:
    """q as wide as p: one-hot if the draft has no probs, zero-padded if the models' padded
    vocabularies differ.
    """
    if draft.probs is not None:
        return padded_like(p, draft.probs)
    return one_hot(draft.tokens, p[:-1])


def padded_like(p: Float[Tensor, "m vocab"], q: Float[Tensor, "n other"]) -> PerNode:
    """q with p's vocabulary, device and precision."""
    return pad(q.to(p), (0, p.shape[-1] - q.shape[-1]))


def acceptance(
    p: Float[Tensor, "*n vocab"], q: Float[Tensor, "*n vocab"]
) -> Float[Tensor, "*n vocab"]:
    """min(1, p / q): how likely each token is accepted by a uniform number u with u·q < p."""
    return torch.where(q > 0, (p / q).clamp(max=1.0), (p > 0).to(p))


def residual(
    p: Float[Tensor, "*n vocab"], q: Float[Tensor, "*n vocab"]
) -> Float[Tensor, "*n vocab"]:
    """norm(max(0, p − q)) of each row; p itself if the difference rounds to zero."""
    difference = (p - q).clamp(min=0)
    total = difference.sum(-1, keepdim=True)
    return torch.where(total > 0, difference / total, p)


def judged_probs(logits: Float[Tensor, "n vocab"], sampling: Sampling) -> PerNode:
    """p as a forgiving rule reads it: what tokens are drawn from; under greedy decoding at
    temperature 1.
    """
    return precise(logits).softmax(-1) if sampling.greedy else sampling.probs(logits)
