"""A small model that drafts a chain of tokens, as in speculative decoding and BiLD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.draft import Draft, Verdict
from bild_lab.errors import UserError
from bild_lab.models.session import Model, Scores
from bild_lab.request import Request
from bild_lab.sampling import draw, precise


@dataclass(frozen=True)
class LowConfidence:
    """Hand over to the target when the drafter's largest probability is below the threshold (BiLD §3.3).

    The probability is the drafter's own, at temperature 1. At equality it drafts.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, int | float) or not 0.0 <= self.threshold <= 1.0:
            raise UserError(
                f"the fallback threshold is a probability and must lie in [0, 1], got {self.threshold!r}; "
                "0 never falls back"
            )

    def __call__(self, confidence: float) -> bool:
        return confidence < self.threshold


class ModelDrafter:
    """Drafts up to `window` tokens with a model, or fewer where `stop` or an end token says so.

    Its cache follows the target's decisions: after a rejection it drops exactly the rows behind the
    last accepted token, so no token is ever computed twice.
    """

    drafts_trees = False

    def __init__(self, draft: Model, window: int, stop: LowConfidence | None = None) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise UserError(f"the draft window must be a whole number >= 1, got {window!r}")
        self._model = draft
        self._window = window
        self._stop = stop

    def start(self, request: Request) -> None:
        self._request = request
        self._session = self._model.start(request.source, request.limits.max_new_tokens)

    def propose(self, tokens: list[int]) -> Draft:
        limits, sampling = self._request.limits, self._request.sampling
        self._base = len(tokens)
        feed = tokens[self._session.length :]
        drafted: list[Tensor] = []  # [1] each
        probs: list[Tensor] = []
        confidences: list[float] = []
        fallback, calls = False, 0
        # on an accelerator a fixed window is drafted without looking: to look is to wait for it
        looks = self._stop is not None or self._model.device.type == "cpu"
        while len(drafted) < min(self._window, limits.room(tokens)):
            logits = self._session.extend(feed, scored=1).logits  # [1, vocab]
            calls += 1
            if sampling.greedy:
                chosen = sampling.choose(logits, None)
            else:
                probs.append(sampling.probs(logits))
                chosen = draw(probs[-1], self._request.generator)
            if self._stop is not None:
                confidence, token = read(precise(logits).softmax(-1).amax(-1), chosen)  # at temperature 1
                confidences.append(confidence)
                if fallback := self._stop(confidence):
                    break
            elif looks:
                token = int(chosen)
            drafted.append(chosen)
            if looks and token in limits.end_tokens:
                break
            feed = chosen
        return Draft(
            tokens=torch.cat(drafted) if drafted else torch.empty(0, dtype=torch.long, device=self._model.device),
            probs=torch.cat(probs[: len(drafted)]) if drafted and probs else None,
            confidence=tuple(confidences),
            fallback=fallback,
            calls=calls,
        )

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self._session.rollback(self._base + len(verdict.path))


def read(confidence: Float[Tensor, " 1"], token: Int[Tensor, " 1"]) -> tuple[float, int]:
    """Both on the host, in one transfer."""
    first, second = torch.cat([confidence.double(), token.double()]).tolist()
    return first, int(second)
