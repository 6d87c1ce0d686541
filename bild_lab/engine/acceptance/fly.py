"""FLy: a mismatch is accepted if the target was unsure there and agrees with what follows."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import forgiving_verdict, judged_probs, own_decisions
from bild_lab.engine.acceptance.trees import PerNode, PerRow, judged_nodes, judging_rows
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.errors import require_number, require_whole

MOST_LIKELY = 3  # tokens that the entropy is taken over
MAX_ENTROPY = MOST_LIKELY / math.e  # nats: −x log x is largest at 1 / e


class Fly(Acceptance):
    """Forgive a mismatch at an uncertain position if the next tokens all match (FLy, Li et al., 2025).

    The target's uncertainty is h = −Σ p log p over its three most likely tokens, in nats. A drafted token that lossless
    speculative sampling rejects is accepted all the same if h >= entropy (the gate) and lossless speculative sampling
    keeps each of the next `deferred_window` drafted tokens, given the mismatch: the target would have corrected an
    error. A mismatch with fewer drafted tokens after it is rejected, and so is one without probability.

    The paper decodes greedily. There the matches are the target's argmax, and h is taken at temperature 1. Sampled, a
    match is a token that speculative sampling accepts, h is taken of the standardized p, and after a rejection the next
    token is drawn from norm(max(0, p − q)). In a tree the tokens that follow are those below, along matches.

    entropy: above 3 / e nats nothing is forgiven, and the rule is lossless.
    """

    accepts_trees = True

    def __init__(self, entropy: float, deferred_window: int) -> None:
        require_number("FLy's entropy", entropy, 0, math.inf, remedy="in nats; smaller forgives more")
        require_whole("FLy's deferred_window", deferred_window, 1)
        self._entropy, self._deferred_window = entropy, deferred_window

    def lossless(self, sampling: Sampling) -> bool:
        return self._entropy > MAX_ENTROPY

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        p, rows = judged_probs(logits, request.sampling), judging_rows(draft)
        unsure = entropy_of_most_likely(p)[rows] >= self._entropy  # [n]
        likelihood = p[rows, draft.tokens]
        own, emitted = own_decisions(draft, logits, request)
        accepted, gate, probs, chosen = draft.to_host(own, unsure, likelihood, emitted)
        matches = matches_below(draft, accepted)
        forgiven = [
            open_ and prob > 0 and below >= self._deferred_window
            for open_, prob, below in zip(gate, probs, matches, strict=True)
        ]
        return forgiving_verdict(draft, accepted, forgiven, probs, chosen)


def entropy_of_most_likely(p: PerNode) -> Float[Tensor, " n"]:
    """−Σ p log p over the three most likely tokens of each row, in nats, without normalizing them."""
    few = p.topk(min(MOST_LIKELY, p.shape[-1]), dim=-1).values
    return torch.special.entr(few).sum(-1)


def matches_below(draft: Draft, accepted: list[float]) -> list[int]:
    """How many tokens in a row are accepted directly below each node, along the first accepted child."""
    nodes, found = judged_nodes(draft), [0] * len(draft)
    for node in reversed(range(len(draft))):  # children come after their parents
        child = next((one for one in nodes[node + 1] if accepted[one]), None)
        found[node] = 0 if child is None else 1 + found[child]
    return found
