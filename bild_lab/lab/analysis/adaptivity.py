"""What choosing the draft's length round by round can give greedy speculative decoding, and what it cannot.

Every text is the target's own. So what a round accepts depends on where it begins and how many tokens it drafts alone,
and each rule for the length can be priced without a clock: rules that see what the drafter knew, and hindsight, which
no rule can beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import isotonic_regression

THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class DraftedText:
    """A text of the target, and what the drafter makes of every token of it after those before.

    matches: whether the drafter's most likely token is the text's. confidences: its probability.
    """

    matches: Bool[np.ndarray, " t"]
    confidences: Float[np.ndarray, " t"]


@dataclass(frozen=True)
class RoundCosts:
    """Seconds on a machine. draft_s: of a drafted token. verify_s: of a round with a forward of 1, 2, … rows."""

    draft_s: float
    verify_s: Sequence[float]

    @property
    def largest(self) -> int:
        """The most tokens of a draft that are priced."""
        return len(self.verify_s) - 1


@dataclass(frozen=True)
class Priced:
    """A rule's cost over all texts. rule: with its knob. accepted, drafted: tokens a round, on average."""

    rule: str
    speedup: float  # over one token a forward
    drafted: float
    accepted: float


Length = Callable[[int, int], tuple[int, int]]  # of a text and a place in it: tokens to verify, drafter's forwards


def audit(texts: Sequence[DraftedText], costs: RoundCosts) -> dict[str, Any]:
    """The best fixed length, the best rules that stop by confidence, and the best lengths in hindsight.

    confidence: drafting stops at the first token whose own probability is below a bar. survival: where the probability
    that the whole draft is accepted falls below it, by confidences calibrated on the other half of the texts
    (isotonic regression). The bar of each is the best on these texts. seen: the share of the gain from the best fixed
    length to hindsight that the better of the two takes; the rest depends on what the drafter does not know.
    """
    fixed = best(
        [_walked(f"window {n}", texts, costs, lambda place, at, n=n: (n, n)) for n in range(costs.largest + 1)]
    )
    survivals = _calibrated(texts)
    confidences = [text.confidences for text in texts]
    confidence, survival = (
        best([_walked(f"{name} {bar:g}", texts, costs, _stopping(values, bar, whole, costs)) for bar in THRESHOLDS])
        for name, values, whole in (("confidence", confidences, False), ("survival", survivals, True))
    )
    hindsight = in_hindsight(texts, costs)
    gain = hindsight.speedup - fixed.speedup
    seen = (max(confidence.speedup, survival.speedup) - fixed.speedup) / gain if gain > 0 else None
    found = {"fixed": fixed, "confidence": confidence, "survival": survival, "hindsight": hindsight}
    return {**{name: vars(one) for name, one in found.items()}, "seen": seen}


def best(priced: Sequence[Priced]) -> Priced:
    return max(priced, key=lambda one: one.speedup)


def in_hindsight(texts: Sequence[DraftedText], costs: RoundCosts) -> Priced:
    """The cheapest lengths, by dynamic programming from each text's end; no more is drafted than is accepted."""
    seconds, rounds, drafted = 0.0, 0, 0
    for text in texts:
        count, run = len(text.matches), _runs(text.matches)
        left, chosen = np.zeros(count + 1), np.zeros(count, dtype=int)
        for at in reversed(range(count)):
            sizes = np.arange(min(run[at], costs.largest) + 1)
            each = sizes * costs.draft_s + np.asarray(costs.verify_s)[sizes] + left[np.minimum(at + sizes + 1, count)]
            chosen[at] = each.argmin()
            left[at] = each[chosen[at]]
        seconds += left[0]
        at = 0
        while at < count:
            rounds, drafted = rounds + 1, drafted + chosen[at]
            at += chosen[at] + 1
    return _priced("hindsight", texts, costs, seconds, rounds, drafted, drafted)


def _walked(rule: str, texts: Sequence[DraftedText], costs: RoundCosts, length: Length) -> Priced:
    """What a rule costs, round by round."""
    seconds, rounds, drafted, accepted = 0.0, 0, 0, 0
    for place, text in enumerate(texts):
        count, run, at = len(text.matches), _runs(text.matches), 0
        while at < count:
            size, forwards = length(place, at)
            size, kept = min(size, count - at), min(size, run[at])
            seconds += forwards * costs.draft_s + costs.verify_s[size]
            rounds, drafted, accepted = rounds + 1, drafted + size, accepted + kept
            at += kept + 1
    return _priced(rule, texts, costs, seconds, rounds, drafted, accepted)


def _stopping(values: Sequence[Float[np.ndarray, " t"]], bar: float, whole: bool, costs: RoundCosts) -> Length:
    """Draft until a token's value is below the bar; that token is drafted, and not verified. whole: their product."""

    def length(place: int, at: int) -> tuple[int, int]:
        ahead = values[place][at : at + costs.largest]
        below = np.flatnonzero((np.cumprod(ahead) if whole else ahead) < bar)
        return (len(ahead), len(ahead)) if not len(below) else (int(below[0]), int(below[0]) + 1)

    return length


def _calibrated(texts: Sequence[DraftedText]) -> list[Float[np.ndarray, " t"]]:
    """The probability that each token is accepted, by isotonic regression on the texts of the other half."""
    found = []
    for at, text in enumerate(texts):
        others = texts[1 - at % 2 :: 2] or texts
        confidences, matches = (np.concatenate([getattr(o, n) for o in others]) for n in ("confidences", "matches"))
        order = np.argsort(confidences, kind="stable")
        fitted = isotonic_regression(matches[order].astype(float)).x
        found.append(np.interp(text.confidences, confidences[order], fitted))
    return found


def _runs(matches: Bool[np.ndarray, " t"]) -> np.ndarray:
    """How many tokens match in a row from each place on."""
    found, length = np.zeros(len(matches), dtype=int), 0
    for at in reversed(range(len(matches))):
        length = length + 1 if matches[at] else 0
        found[at] = length
    return found


def _priced(
    rule: str, texts: Sequence[DraftedText], costs: RoundCosts, seconds: float, rounds: int, drafted: int, accepted: int
) -> Priced:
    alone = sum(len(text.matches) for text in texts) * costs.verify_s[0]
    return Priced(rule, float(alone / seconds), float(drafted / rounds), float(accepted / rounds))
