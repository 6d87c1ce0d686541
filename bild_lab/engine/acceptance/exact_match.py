"""Keep drafted tokens as long as they are the ones the target itself chooses."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling


class ExactMatch:
    """The target chooses a token after every row; a drafted path is accepted as far as it agrees.

    Lossless: every emitted token is the target's own choice (its argmax, or a sample from its distribution).
    """

    accepts_trees = True
    needs: frozenset[str] = frozenset()

    def lossless(self, sampling: Sampling) -> bool:
        return True

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        (chosen,) = draft.to_host(request.sampling.choose(logits, request.generator))  # [n+1]
        path: list[int] = []
        node = ROOT
        while (following := draft.child(node, chosen[node + 1])) is not None:
            path.append(following)
            node = following
        return Verdict(path=tuple(path), next_token=int(chosen[node + 1]))

    def law(
        self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request, drawn: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n+1 vocab"]:
        return request.sampling.probs(logits)  # whatever was drafted
