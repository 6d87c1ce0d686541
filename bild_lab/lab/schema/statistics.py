"""Estimates with intervals from paired, repeated timings, acceptance, and which points of a sweep
are worth using.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri, stdtrit

from bild_lab.errors import UserError
from bild_lab.lab.schema.numbers import Latency, Speedup
from bild_lab.lab.schema.result import Result

RESAMPLES = 2000
# with fewer, intervals that are called 95 % hold clearly less often than nine times in ten
# (docs/design.md)
ENOUGH_EXAMPLES = 20  # for the speedup's interval
# texts that are not the baseline's, for the interval of the quality difference
ENOUGH_DIFFERENT = 8


def paired_speedup(
    baseline_s: Float[np.ndarray, "examples repeats"],
    method_s: Float[np.ndarray, "examples repeats"],
    seed: int = 0,
) -> Speedup:
    """The speedup of the method over the baseline. Both are timed in seconds on the same examples
    in the same run.

    The median of an example's repeats counts. Bootstrap resampling keeps the pairs together.
    """
    return paired_ratio([baseline_s], [method_s], seed)


def paired_ratio(
    above: Sequence[np.ndarray], below: Sequence[np.ndarray], seed: int = 0
) -> Speedup:
    """The product of some totals over that of others, of seconds by example and repeat, as in
    `paired_speedup`.
    """
    over, under = ([np.median(seconds, axis=1) for seconds in totals] for totals in (above, below))

    def ratio(total: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return math.prod(map(total, over)) / math.prod(map(total, under))

    count = len(over[0])
    picks = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(ratio(lambda seconds: seconds[picks].sum(1)), [0.025, 0.975])
    value, median = ratio(np.sum), np.median(ratio(lambda seconds: seconds))
    return Speedup(float(value), float(low), float(high), float(median))


def interval_of_best(value: float, low: float, high: float, count: int) -> tuple[float, float]:
    """The ends of a 95 % interval, moved away from its value until it holds for the best of so many
    points.

    Bonferroni's correction: each point's interval has the level 1 − 0.05 / count, and so all hold
    together in 95 % of cases, whichever is chosen. Each end moves as that of a normal distribution
    does.
    """
    wider = ndtri(1 - 0.025 / count) / ndtri(0.975)
    return value - wider * (value - low), value + wider * (high - value)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of a few runs and its 95 % interval by Student's t."""
    half = stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(np.mean(values) - half), float(np.mean(values) + half)


def latency_summary(latency_s: Float[np.ndarray, "examples repeats"]) -> Latency:
    """Statistics of seconds per example; the median of an example's repeats counts."""
    per_example = np.median(latency_s, axis=1)
    return Latency(
        median=float(np.median(per_example)),
        p95=float(np.quantile(per_example, 0.95)),
        mean=float(per_example.mean()),
        total=float(per_example.sum()),
    )


def clock_noise(
    baseline_s: Float[np.ndarray, "examples repeats"],
    method_s: Float[np.ndarray, "examples repeats"],
) -> float | None:
    """How far the speedup on these texts may be off, as a share: half its 95 % interval over the
    repeats.

    Each repeat of all texts gives a ratio of total times; Student's t over their logarithms, as for
    any few repeated timings (Georges et al., 2007, §3.2). None for a single repeat.
    """
    ratios = np.log(baseline_s.sum(axis=0) / method_s.sum(axis=0))  # [repeats]
    count = len(ratios)
    if count < 2:
        return None
    return float(np.expm1(stdtrit(count - 1, 0.975) * ratios.std(ddof=1) / math.sqrt(count)))


def judged_by_position(rounds: list[tuple[int, int]]) -> list[list[int]]:
    """For each position of a draft: how many rounds accepted its token, rejected it, and never
    observed it.

    rounds: (drafted, accepted) tokens of each; of a tree, its depth and the accepted path. The
    first token after the accepted ones is rejected. Those after it were dropped unjudged: they say
    nothing of the drafter.
    """
    longest = max((drafted for drafted, _ in rounds), default=0)
    judged = [[0, 0, 0] for _ in range(longest)]
    for drafted, accepted in rounds:
        for position in range(drafted):
            judged[position][(position >= accepted) + (position > accepted)] += 1
    return judged


def acceptance_by_position(rounds: list[tuple[int, int]]) -> list[float]:
    """For each position: accepted / (accepted + rejected), over the rounds that accepted all tokens
    before it.
    """
    rates = []
    for accepted, rejected, _ in judged_by_position(rounds):
        if not accepted + rejected:
            break
        rates.append(accepted / (accepted + rejected))
    return rates


def acceptance_rate(rounds: list[tuple[int, int]]) -> float | None:
    """The probability that a drafted token is accepted if those before it were: accepted /
    (accepted + rejections).

    It estimates α of the speculative decoding paper. Tokens after a rejection were never judged.
    """
    accepted = sum(accepted_tokens for _, accepted_tokens in rounds)
    judged = accepted + sum(accepted_tokens < drafted for drafted, accepted_tokens in rounds)
    return accepted / judged if judged else None


def nothing_accepted(rounds: list[tuple[int, int]]) -> float | None:
    """Of the rounds (drafted, accepted) that drafted something, the share that accepted nothing."""
    accepted_counts = [accepted for drafted, accepted in rounds if drafted]
    return accepted_counts.count(0) / len(accepted_counts) if accepted_counts else None


TOLERANCE = 1e-9  # two scores of identical outputs may differ in the last bits


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the undominated (cost, quality) points, cheapest first.

    A point is dominated when another costs no more, is no worse, and is better in one of the two.
    Points with equal cost and equal quality are all kept, in their order. Raises UserError for a
    cost or quality that is not finite.
    """
    for index, point in enumerate(points):
        if not all(map(math.isfinite, point)):
            raise UserError(
                f"a Pareto front needs finite costs and qualities, got {point} at point {index};"
                " leave it out"
            )
    order = sorted(
        range(len(points)), key=lambda index: (points[index][0], -points[index][1], index)
    )
    front: list[int] = []
    for index in order:
        if (
            not front
            or points[index][1] > points[front[-1]][1]
            or points[index] == points[front[-1]]
        ):
            front.append(index)
    return front


def best_at_loss(results: Sequence[Result], loss: float) -> Result | None:
    """The fastest result whose quality is at least its baseline's minus `loss` points.

    Every result is compared with the baseline's quality in its own setting. The baseline itself,
    and results measured without a baseline or with an impossible speedup, do not count. Among
    equally fast results the one with better quality wins.
    """
    known = (
        result
        for result in results
        if None not in (result.speedup.value, result.quality.value, result.quality.baseline)
    )
    within_loss = [
        result
        for result in known
        if not (result.is_baseline or result.impossible)
        and result.quality.value >= result.quality.baseline - loss - TOLERANCE
    ]
    return max(
        within_loss, key=lambda result: (result.speedup.value, result.quality.value), default=None
    )
