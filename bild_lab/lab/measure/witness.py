"""Decoding again with a witness beside the acceptance rule, and the target's own scores, one row after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.protocols import Acceptance, ReadsRound
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import Sampling, precise
from bild_lab.engine.session import EVERYTHING, LAST, Model, Scores, Want
from bild_lab.engine.trace import Trace

# What a round showed: the text before it, prompt included, the round's rule, the draft, the logits that the rule got,
# and its verdict.
See = Callable[[list[int], Acceptance, Draft, Float[Tensor, "n+1 vocab"], Verdict], None]


@dataclass(frozen=True)
class Witness:
    """An acceptance rule that shows every round before its verdict stands. text: before the round."""

    rule: Acceptance
    see: See
    text: Sequence[int] = ()

    @property
    def accepts_trees(self) -> bool:
        return self.rule.accepts_trees

    @property
    def needs(self) -> frozenset[str]:
        return self.rule.needs

    @property
    def wants(self) -> Want:
        return self.rule.wants if isinstance(self.rule, ReadsRound) else EVERYTHING

    def lossless(self, sampling: Sampling) -> bool:
        return self.rule.lossless(sampling)

    def in_round(self, tokens: Sequence[int], scores: Scores) -> Witness:
        """The witness of this round."""
        rule = self.rule.in_round(tokens, scores) if isinstance(self.rule, ReadsRound) else self.rule
        return replace(self, rule=rule, text=tuple(tokens))

    def __call__(self, draft: Draft, logits: Float[Tensor, "n+1 vocab"], request: Request) -> Verdict:
        verdict = self.rule(draft, logits, request)
        self.see(list(self.text), self.rule, draft, logits, verdict)
        return verdict


def witnessed(method: DraftThenVerify, request: Request, see: See) -> list[int]:
    """Decode with a witness. Returns the emitted tokens. request: with a generator of its own, as it was timed."""
    watched = replace(method, acceptance=Witness(method.acceptance, see))
    return watched.decode(request, Trace())[request.limits.prompt_length :]


def visited(text: Sequence[int], verdict: Verdict, request: Request) -> list[tuple[int, int]]:
    """The contexts in which a round emitted a token: each one's place among the emitted tokens, and its row of logits.

    Tokens behind the text's end are not emitted; the caller knows where that is.
    """
    first = len(text) - request.limits.prompt_length
    return [(first + depth, row) for depth, row in enumerate([0, *(node + 1 for node in verdict.path)])]


class OneRow:
    """A model's logits behind texts of one request, one row after another. What a text shares with the last stays."""

    def __init__(self, model: Model, request: Request) -> None:
        self._session = model.start(request.source, request.limits.max_new_tokens)
        self._fed = list(request.source.prompt[:-1])
        self._logits: dict[tuple[int, ...], Float[Tensor, " vocab"]] = {}

    def behind(self, text: Sequence[int]) -> Float[Tensor, " vocab"]:
        """text: with the prompt."""
        key = tuple(text)
        if key not in self._logits:
            pairs = enumerate(zip(self._fed, text[:-1], strict=False))
            same = next((at for at, (one, other) in pairs if one != other), min(len(self._fed), len(text) - 1))
            self._session.rollback(same)
            for token in text[same:]:
                logits = precise(self._session.extend([token], LAST).logits[0])
            self._fed, self._logits[key] = list(text), logits.clone()
        return self._logits[key]


def total_variation(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> float:
    """Half the sum of |p − q|: the largest difference in the probability of any set of tokens; 1 if one is NaN."""
    return float((p.double() - q.double()).abs().sum().nan_to_num(nan=2.0)) / 2


def distribution(sampling: Sampling, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """What tokens are sampled from, in float64."""
    return sampling.probs(logits.double()[None])[0]


def largest(logits: Sequence[Float[Tensor, " vocab"]]) -> float:
    """The largest of these logits that is finite, by its size: a processor forbids a token by −inf."""
    return max(float(each[each.isfinite()].abs().max()) for each in logits)


def difference(used: Float[Tensor, " vocab"], own: Float[Tensor, " vocab"]) -> float:
    """The largest difference between two rows of logits, relative to their largest logit; inf if they forbid others."""
    finite = used.isfinite()
    if not torch.equal(finite, own.isfinite()):
        return float("inf")
    return float((used - own)[finite].abs().max()) / largest([used, own])
