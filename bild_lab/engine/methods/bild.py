"""BiLD's rollback policy."""

from __future__ import annotations

import math
from dataclasses import replace

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.tree_acceptance import (
    PerNode,
    PerRow,
    best_sibling,
    judging_rows,
    output_of_threshold,
    tree_verdict,
)
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.errors import require_number

RELEASED_THRESHOLD = 5.0  # the default of the released loop


class Rollback(Acceptance):
    """Keep the draft until its cross-entropy, in nats, exceeds the threshold (BiLD §3.4, Eq. 3).

    The distance of a drafted token is −log p(token), where p is the target's distribution at
    temperature 1. The first token above the threshold is replaced by the target's choice, and
    everything after it is dropped. In a tree the most likely of the siblings below the threshold is
    kept. Each round's statistics hold the distances as `distance`. Under greedy decoding a
    threshold below ln 2 is lossless: a token with p > 1/2 is the target's argmax.
    """

    accepts_trees = True

    def __init__(self, threshold: float) -> None:
        require_number(
            "the rollback threshold, in nats,",
            threshold,
            0,
            math.inf,
            above=True,
            remedy="use inf to switch it off",
        )
        self._threshold = threshold

    def lossless(self, sampling: Sampling) -> bool:
        return sampling.greedy and self._threshold < math.log(2)

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        log_probs = precise(logits).log_softmax(-1)  # [n+1, vocab]
        distance = -log_probs[judging_rows(draft), draft.tokens]  # [n], nats
        distances, target_tokens = draft.to_host(
            distance, request.sampling.choose(logits, request.generator)
        )
        choose = best_sibling([-nats for nats in distances], -self._threshold)
        return tree_verdict(draft, choose, target_tokens, distance=distances)

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow | None:
        passes = -precise(logits).log_softmax(-1) <= self._threshold
        return output_of_threshold(passes, draft, request.sampling.probs(logits), proposal_probs)


class ReleasedRollback(Rollback):
    """Rollback as BiLD's released loop has it, for chains and greedy decoding.

    If the first token above the threshold is the one that the target itself would choose, the whole
    draft is accepted, whatever the distances of the tokens after it. A threshold of 0 stands for 5.
    Source: `_greedy_search_body` of `T5BiLDModel`, src/transformers/models/t5/modeling_t5.py of
    kssteven418/BigLittleDecoder.
    """

    accepts_trees = False
    greedy_only = True

    def __init__(self, threshold: float) -> None:
        super().__init__(RELEASED_THRESHOLD if threshold == 0 else threshold)

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        verdict = super().__call__(draft, logits, request)
        place = len(verdict.path)
        if place == len(draft) or verdict.next_token != draft.token_list[place]:
            return verdict
        token_after_draft = request.sampling.choose(logits[-1:], None)
        return replace(verdict, path=tuple(range(len(draft))), next_token=int(token_after_draft))

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> None:
        """It samples nothing."""
