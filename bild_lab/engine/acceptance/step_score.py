"""A step-level cascade's rule: a drafted step is kept as a whole, or not at all."""

from __future__ import annotations

import math
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.acceptance.trees import PerRow, judging_rows
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.errors import UserError


class StepScorer(Protocol):
    """Scores a drafted step; a higher score is better."""

    def __call__(self, draft: Draft, logits: PerRow) -> Float[Tensor, " 1"]:
        """draft: the step, a chain of n > 0 tokens. logits: of the target, after the text and each drafted token."""


class MeanLogProbability:
    """The mean of log p over the step's tokens, in nats, where p is the target's own, at temperature 1."""

    def __call__(self, draft: Draft, logits: PerRow) -> Float[Tensor, " 1"]:
        log_probs = precise(logits[: len(draft)]).log_softmax(-1)
        return log_probs[judging_rows(draft), draft.tokens].mean(0, keepdim=True)


class StepScore(Acceptance):
    """Keep a drafted step if its score is at least the threshold, else drop all of it.

    This is the granularity of SpecReason (Pan et al., 2025) and Arbitrage (2025), whose scores a prompted target or a
    reward model gives; here it is the `scorer`, by default what the target's own forward says of the step. The target's
    next token begins the step after one that is kept. A step that is not kept is rewritten by the target
    (`StepDrafter`), and this round emits its first token. Each round's statistics hold the step's `score`.

    threshold: of the scorer; for `MeanLogProbability` in nats per token, at most 0; −inf keeps every step.
    """

    accepts_trees = False

    def __init__(self, threshold: float, scorer: StepScorer | None = None) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or math.isnan(threshold):
            raise UserError(f"a step's threshold must be a number, got {threshold!r}; -inf keeps every step")
        self._threshold = threshold
        self._scorer = MeanLogProbability() if scorer is None else scorer

    def lossless(self, sampling: Sampling) -> bool:
        return False

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        chosen = request.sampling.choose(logits, request.generator)
        if not len(draft):
            (emitted,) = draft.to_host(chosen)
            return Verdict((), int(emitted[0]))
        (score,), emitted = draft.to_host(self._scorer(draft, logits), chosen)
        kept = len(draft) if score >= self._threshold else 0
        return Verdict(tuple(range(kept)), int(emitted[kept]), stats={"score": score})
