"""Keep drafted tokens as long as they are the ones the target itself chooses, in the whole text or
at its beginning.
"""

from __future__ import annotations

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.tree_acceptance import (
    PerNode,
    PerRow,
    first_accepted,
    tree_verdict,
)
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling


class ExactMatch(Acceptance):
    """The target chooses a token after every row; a drafted path is accepted as far as it agrees.

    Lossless: every emitted token is the target's own choice (its argmax, or a sample from its
    distribution).
    """

    accepts_trees = True

    def lossless(self, sampling: Sampling) -> bool:
        return True

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        choices = request.sampling.choose(logits, request.generator)  # [n+1]
        (target_tokens,) = draft.to_host(choices)
        drafted = zip(draft.token_list, draft.parent_list, strict=True)
        agrees = [token == target_tokens[parent + 1] for token, parent in drafted]
        return tree_verdict(draft, first_accepted(agrees), target_tokens)

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow:
        return request.sampling.probs(logits)  # whatever was drafted
