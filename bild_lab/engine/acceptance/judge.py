"""Judge decoding: a trained classifier decides which mismatches are kept."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.acceptance.speculative_sampling import forgiving_verdict, judged_probs, own_decisions
from bild_lab.engine.acceptance.trees import PerRow, judging_rows
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.heads.judge import JudgeHead
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import Scores, Want
from bild_lab.errors import UserError, require_number


class Judge(Acceptance):
    """Forgive a mismatch that a classifier holds to be unimportant (AutoJudge, Garipov et al., 2025; Judge decoding).

    A drafted token that lossless speculative sampling rejects is accepted all the same if the classifier's chance that
    it matters is below the threshold. The classifier reads the target's last hidden state at the drafted token itself,
    which verification computes anyway. A token to which p gives no probability is rejected in any case. In a tree what
    lossless decoding keeps comes first, then the most likely that is forgiven. Each round's statistics hold the
    classifier's chances as `importance`.

    adapter: the classifier. threshold: in [0, 1]; at 0 the rule is lossless; None: the one chosen in training.
    """

    accepts_trees = True
    wants = Want(head_input=True)

    def __init__(self, adapter: JudgeHead, threshold: float | None = None) -> None:
        threshold = adapter.config.threshold if threshold is None else threshold
        require_number("the judge's threshold", threshold, 0, 1, remedy="larger accepts more, 0 is lossless")
        self._adapter, self._threshold = adapter, threshold
        self._states: Float[Tensor, "rows dim"] | None = None  # after the last committed token and each drafted one

    def lossless(self, sampling: Sampling) -> bool:
        return self._threshold == 0

    def in_round(self, tokens: Sequence[int], scores: Scores) -> Acceptance:
        """The rule with the states of this round's forward."""
        rule = copy(self)
        rule._states = scores.head_input
        return rule

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        if self._states is None:
            raise UserError("a judge reads the target's hidden states as well; decode with DraftThenVerify")
        p, rows = judged_probs(logits, request.sampling), judging_rows(draft)
        importance = self._adapter(self._states[1 : len(draft) + 1])  # [n]
        accepted, emitted = own_decisions(draft, logits, request)
        own, chances, probs, chosen = draft.to_host(accepted, importance, p[rows, draft.tokens], emitted)
        forgiven = [chance < self._threshold and prob > 0 for chance, prob in zip(chances, probs, strict=True)]
        verdict = forgiving_verdict(draft, own, forgiven, probs, chosen)
        return replace(verdict, stats={**verdict.stats, "importance": tuple(chances)})
