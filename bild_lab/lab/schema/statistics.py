"""Estimates with intervals from paired, repeated timings, acceptance, and which points of a sweep
are worth using.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri, stdtrit

from bild_lab.lab.schema.numbers import Latency, Speedup
from bild_lab.lab.schema.questions import questions_of
from bild_lab.lab.schema.result import Result

FEWEST_RUNS = 3  # for the interval of a mean over runs
# with fewer, intervals that are called 95 % hold clearly less often than nine times in ten
# (docs/design.md)
ENOUGH_EXAMPLES = 20  # for the speedup's interval
# texts that are not the baseline's, for the interval of the quality difference
ENOUGH_DIFFERENT = 8


def are_enough(texts: int) -> bool:
    """Whether intervals over so many independent texts that came are wide enough to call a point
    better or faster. A conversation counts once.
    """
    return texts >= ENOUGH_EXAMPLES


def can_be_judged(result: Result) -> bool:
    """Whether a point has enough texts, and a clock that is known well enough, to be called better
    or faster than others. Some points of a setting may have fewer: a server failed to give texts.
    """
    return are_enough(result.counted_texts) and result.clock_is_known


def conversations_of(ids: Sequence[str]) -> list[int] | None:
    """The conversation of each example, from 0 in order of appearance. Its turns share it, and one
    question in several templates does.

    What an interval must keep together, as a later turn goes on from the earlier ones: turns that
    count as if they were independent make intervals too narrow. None where every example is alone.
    """
    questions = questions_of(ids)
    places = {question: place for place, question in enumerate(dict.fromkeys(questions))}
    return None if len(places) == len(ids) else [places[question] for question in questions]


def paired_speedup(
    baseline_s: Float[np.ndarray, "examples repeats"],
    method_s: Float[np.ndarray, "examples repeats"],
    conversations: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
) -> Speedup:
    """The speedup of the method over the baseline. Both are timed in seconds on the same examples
    in the same run.

    The median of an example's repeats counts. The interval is over pairs of texts, the turns of a
    conversation together. conversations: as `conversations_of` numbers them. blocks: in a batch,
    the block that each example was timed in. What disturbs the clock there disturbs all texts of a
    block, which an interval over texts does not see: its error is added, as far as repeats show it.
    """
    speedup = paired_ratio([baseline_s], [method_s], conversations)
    noise = clock_noise(baseline_s, method_s, blocks)
    if blocks is not None and noise is not None:
        speedup = with_clock_noise(speedup, [noise])
    return replace(speedup, noise=noise, repeats=baseline_s.shape[1])


def with_clock_noise(ratio: Speedup, noises: Sequence[float]) -> Speedup:
    """The ratio with its interval wider by errors of the clock, each as `clock_noise` gives it.

    Independent errors add as squares, of the logarithms.
    """
    clock = [math.log1p(noise) for noise in noises]
    below = math.hypot(max(0.0, math.log(ratio.value / ratio.low)), *clock)
    above = math.hypot(max(0.0, math.log(ratio.high / ratio.value)), *clock)
    return replace(ratio, low=ratio.value * math.exp(-below), high=ratio.value * math.exp(above))


def paired_ratio(
    above: Sequence[np.ndarray],
    below: Sequence[np.ndarray],
    conversations: Sequence[int] | None = None,
) -> Speedup:
    """The product of some totals over that of others, of seconds by example and repeat, as in
    `paired_speedup`.
    """
    numerators = [np.median(seconds, axis=1) for seconds in above]
    denominators = [np.median(seconds, axis=1) for seconds in below]
    value, low, high = ratio_of_totals(numerators, denominators, conversations)
    single_ratios = math.prod(numerators) / math.prod(denominators)
    return Speedup(value, low, high, float(np.median(single_ratios)))


def ratio_of_totals(
    numerators: Sequence[Float[np.ndarray, " texts"]],
    denominators: Sequence[Float[np.ndarray, " texts"]],
    conversations: Sequence[int] | None = None,
) -> tuple[float, float, float]:
    """The product of some totals over texts, divided by that of others, with the ends of its 95 %
    interval. conversations: as in `paired_speedup`. One text has an interval of no width, and so has
    a total of nothing.

    The logarithm of the ratio has the deviation of its linear terms, of each text how far it is from
    the mean, relatively (Cochran, Sampling Techniques, 1977, §6.4), and Student's quantile. A
    bootstrap, which resamples the same texts, holds less often where they are few: in 88 of 100 cases
    at 8 texts and 92 at 20, this in 94 and 93; where a tenth of the texts gain three times as much as
    the others, it in 74 and 86, this in 82 and 88, both in 93 at 100.
    """
    if conversations is not None:
        numerators, denominators = (
            [np.bincount(conversations, weights=of_text) for of_text in totals]
            for totals in (numerators, denominators)
        )
    value = math.prod(map(np.sum, numerators)) / math.prod(map(np.sum, denominators))
    texts = len(numerators[0])
    if texts == 1 or not 0 < value < math.inf:
        return float(value), float(value), float(value)
    above, below = (
        sum(of_text / of_text.mean() for of_text in totals) for totals in (numerators, denominators)
    )
    error = (above - below).std(ddof=1) / math.sqrt(texts)
    reach = math.exp(stdtrit(texts - 1, 0.975) * error)
    return float(value), float(value / reach), float(value * reach)


def interval_of_best(
    value: float, low: float, high: float, count: int, texts: int
) -> tuple[float, float]:
    """The ends of a 95 % interval of a quality, moved away from its value until it holds for the best
    of so many points.

    Bonferroni's correction: each point's interval has the level 1 − 0.05 / count, and so all hold
    together in 95 % of cases, whichever is chosen. Each end moves from the normal quantile, which a
    bootstrap has, to that of Student's t. texts: how many independent ones the interval is over, at
    least two; a bootstrap's deviation is too small by √((texts − 1) / texts).
    """
    quantile = stdtrit(texts - 1, 1 - 0.025 / count) * math.sqrt(texts / (texts - 1))
    widening = quantile / ndtri(0.975)
    return value - widening * (value - low), value + widening * (high - value)


def speedup_interval_of_best(
    value: float, low: float, high: float, count: int, texts: int
) -> tuple[float, float]:
    """As `interval_of_best`, of a speedup, whose interval is over logarithms and has Student's
    quantile already.
    """
    widening = float(stdtrit(texts - 1, 1 - 0.025 / count) / stdtrit(texts - 1, 0.975))
    return value * (low / value) ** widening, value * (high / value) ** widening


def corrected_for_choice(result: Result, count: int) -> Result:
    """A point with intervals of its speedup and its difference in quality that hold for the best of
    so many points; as it is, if it was not chosen, or has too few texts.
    """
    texts, speedup, quality = result.counted_texts, result.speedup, result.quality
    if count == 1 or not are_enough(texts):
        return result
    if None not in (speedup.low, speedup.high):
        low, high = speedup_interval_of_best(speedup.value, speedup.low, speedup.high, count, texts)
        speedup = replace(speedup, low=low, high=high)
    if None not in (quality.difference_low, quality.difference_high):
        low, high = interval_of_best(
            quality.difference, quality.difference_low, quality.difference_high, count, texts
        )
        quality = replace(quality, difference_low=low, difference_high=high)
    return replace(result, speedup=speedup, quality=quality)


def mean_with_interval(
    values: Sequence[float], count: int = 1
) -> tuple[float, float | None, float | None]:
    """The mean of a few runs and its 95 % interval by Student's t; None for the ends of fewer than
    three runs, which would be a dozen deviations away. count: of how many points it is the best; the
    interval holds for that, as in `interval_of_best`.
    """
    mean = float(np.mean(values))
    if len(values) < FEWEST_RUNS:
        return mean, None, None
    quantile = stdtrit(len(values) - 1, 1 - 0.025 / count)
    half_width = float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean, mean - half_width, mean + half_width


def mean_speedup_with_interval(
    speedups: Sequence[float], count: int = 1
) -> tuple[float, float | None, float | None]:
    """The geometric mean of a few runs' speedups, and its interval as in `mean_with_interval`."""
    mean, low, high = mean_with_interval(np.log(speedups).tolist(), count)
    ends = (None if end is None else math.exp(end) for end in (low, high))
    return math.exp(mean), *ends


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
    blocks: Sequence[int] | None = None,
) -> float | None:
    """How far the speedup on these texts may be off, as a share: half its 95 % interval over the
    repeats.

    Each repeat, a pass over all texts, gives a ratio of total times; Student's t over their
    logarithms, as for any few repeated timings (Georges et al., 2007, §3.2), wider as the median of
    repeats counts and not their mean. blocks: of a batch, as `paired_speedup` takes them. Each has
    ratios of its own, whose variances about its mean are pooled: all repeats of all blocks then say
    how noisy one timing is. None for a single repeat.
    """
    repeats = baseline_s.shape[1]
    if repeats < 2:
        return None
    if blocks is None:
        blocks = [0] * len(baseline_s)
    block_of_example = np.unique(blocks, return_inverse=True)[1]  # numbered from 0 without gaps
    members = np.eye(block_of_example.max() + 1)[block_of_example]  # [examples, blocks]
    baseline_by_block, method_by_block = members.T @ baseline_s, members.T @ method_s
    log_ratios = np.log(baseline_by_block / method_by_block)  # [blocks, repeats]
    deviation = math.sqrt(log_ratios.var(axis=1, ddof=1).mean())  # of one timing of a block
    shares = method_by_block.sum(1) / method_by_block.sum()  # what a block has of all seconds
    error = deviation * math.sqrt((shares**2).sum() / repeats) * error_of_median(repeats)
    return float(np.expm1(stdtrit(len(shares) * (repeats - 1), 0.975) * error))


@lru_cache
def error_of_median(count: int) -> float:
    """The standard error of the median of so many normal values, over that of their mean: 1 for two,
    1.16 for three, towards √(π/2) = 1.25 for many. Drawn, to half a percent.
    """
    values = np.random.default_rng(0).normal(size=(50_000, count))
    return float(np.median(values, axis=1).std() / values.mean(axis=1).std())


def judged_by_position(rounds: list[tuple[int, int]]) -> list[list[int]]:
    """How many rounds accepted, rejected and never observed the token at each position of a draft.

    rounds: (drafted, accepted) tokens of each; of a tree, its depth and the accepted path. The
    first token after the accepted ones is rejected. Those after it were dropped unjudged: they say
    nothing of the drafter.
    """
    longest = max((drafted for drafted, _ in rounds), default=0)
    counts = [[0, 0, 0] for _ in range(longest)]
    for drafted, accepted in rounds:
        for position in range(drafted):
            if position < accepted:
                outcome = 0
            elif position == accepted:
                outcome = 1
            else:
                outcome = 2
            counts[position][outcome] += 1
    return counts


def acceptance_by_position(rounds: list[tuple[int, int]]) -> list[float]:
    """The share of rounds that accepted each position of a draft, accepted / (accepted + rejected),
    of those that accepted all tokens before it.
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
    accepted_tokens = sum(accepted for _, accepted in rounds)
    rejections = sum(accepted < drafted for drafted, accepted in rounds)
    judged_tokens = accepted_tokens + rejections
    return accepted_tokens / judged_tokens if judged_tokens else None


def nothing_accepted(rounds: list[tuple[int, int]]) -> float | None:
    """The share that accepted nothing, of the rounds (drafted, accepted) that drafted something."""
    accepted_counts = [accepted for drafted, accepted in rounds if drafted]
    if not accepted_counts:
        return None
    return accepted_counts.count(0) / len(accepted_counts)


TOLERANCE = 1e-9  # two scores of identical outputs may differ in the last bits


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the undominated (cost, quality) points, cheapest first.

    A point is dominated when another costs no more, is no worse, and is better in one of the two.
    Points with equal cost and equal quality are all kept, in their order.
    """

    def by_cost_and_quality(index: int) -> tuple[float, float, int]:
        cost, quality = points[index]
        return cost, -quality, index

    front: list[int] = []
    for index in sorted(range(len(points)), key=by_cost_and_quality):
        if not front:
            front.append(index)
            continue
        best_point = points[front[-1]]
        if points[index][1] > best_point[1] or points[index] == best_point:
            front.append(index)
    return front


def best_at_loss(results: Sequence[Result], loss: float) -> Result | None:
    """The fastest result whose quality is at least its baseline's minus `loss`, in the metric's unit.

    Every result is compared with the baseline's quality in its own setting. The baseline itself,
    and results measured without a baseline, with an impossible speedup or without a word, do not
    count. Among equally fast results the one with better quality wins.
    """
    within_loss = []
    for result in results:
        speedup, quality = result.speedup.value, result.quality
        if None in (speedup, quality.value, quality.baseline):
            continue
        if result.is_baseline or not result.may_be_best:
            continue
        if quality.value >= quality.baseline - loss - TOLERANCE:
            within_loss.append(result)
    return max(
        within_loss,
        key=lambda result: (result.speedup.value, result.quality.value),
        default=None,
    )
