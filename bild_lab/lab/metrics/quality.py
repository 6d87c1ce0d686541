"""The quality of outputs with a confidence interval over examples, and the quality difference of two systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from bild_lab.errors import UserError
from bild_lab.lab.metrics.bleu import bleu_from_sums, bleu_statistics
from bild_lab.lab.metrics.bootstrap import RESAMPLES, interval, p_value, resampled_sums
from bild_lab.lab.metrics.rouge import NAMES as ROUGE_NAMES
from bild_lab.lab.metrics.rouge import rouge_statistics

METRICS = ("bleu", "rouge", "agreement")

References = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Score:
    """A metric of a set of outputs, 0 to 100, with its 95 % bootstrap interval over examples."""

    metric: str  # as shown: "BLEU", "ROUGE-L", "agreement"
    value: float
    low: float
    high: float
    signature: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)  # rouge1, rouge2, rougeLsum


@dataclass(frozen=True)
class Difference:
    """Predictions minus baseline in points of the metric, with its paired 95 % bootstrap interval."""

    metric: str
    value: float
    low: float
    high: float
    p_value: float  # two-sided, paired bootstrap; 1 for identical outputs


@dataclass(frozen=True)
class _Measure:
    """A metric: statistics of each example that add up, and the function from their sums to the value."""

    metric: str
    statistics: Float[np.ndarray, "n k"]
    value_of: Callable[[Float[np.ndarray, "*batch k"]], Float[np.ndarray, "*batch"]]
    signature: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return float(self.value_of(self.statistics.sum(axis=0)))


def score(metric: str, predictions: Sequence[str], references: References, *, seed: int = 0) -> Score:
    """Score outputs against one or more references each.

    "bleu" is sacrebleu's corpus BLEU, "rouge" the mean ROUGE-L f-measure with stemming, "agreement"
    the percentage of predictions equal to (one of) their references, such as a baseline's outputs.
    Raises UserError for an unknown metric, no predictions, or an example without references.
    """
    measure = _measure(metric, predictions, references)
    low, high = interval(measure.value_of(resampled_sums(measure.statistics, seed)))
    signature = f"{measure.signature}|bs:{RESAMPLES}|seed:{seed}" if measure.signature else None
    return Score(measure.metric, measure.value, low, high, signature, measure.extra)


def compare(
    metric: str, predictions: Sequence[str], baseline: Sequence[str], references: References, *, seed: int = 0
) -> Difference:
    """How much better (positive) or worse (negative) the predictions are than the baseline's, paired by example.

    Raises UserError as `score` does.
    """
    ours, theirs = (_measure(metric, outputs, references) for outputs in (predictions, baseline))
    value = ours.value - theirs.value
    resampled = [each.value_of(resampled_sums(each.statistics, seed)) for each in (ours, theirs)]
    differences = resampled[0] - resampled[1]
    low, high = interval(differences)
    return Difference(ours.metric, value, low, high, p_value(differences, value))


def score_pool(
    metric: str,
    pool: Sequence[str],
    references: References,
    systems: Sequence[Sequence[int]],
    baseline: Sequence[int],
    *,
    seed: int = 0,
) -> list[tuple[Score, Difference]]:
    """`score` and `compare` of many systems whose texts repeat: each text of the pool is scored once.

    pool: texts, each with its own references. systems, baseline: for each example, which text of the pool it gets.
    Systems with the same texts share their intervals.
    """
    whole = _measure(metric, pool, references)
    value_of = whole.value_of if metric == "bleu" else _mean_of_first(len(baseline))
    found: dict[tuple[int, ...], tuple[float, Float[np.ndarray, " resamples"]]] = {}

    def resampled(picks: Sequence[int]) -> tuple[float, Float[np.ndarray, " resamples"]]:
        if (key := tuple(picks)) not in found:
            statistics = whole.statistics[list(picks)]
            found[key] = float(value_of(statistics.sum(axis=0))), value_of(resampled_sums(statistics, seed))
        return found[key]

    base, base_values = resampled(baseline)
    results: dict[tuple[int, ...], tuple[Score, Difference]] = {}
    for picks in systems:
        if (key := tuple(picks)) in results:
            continue
        value, values = resampled(picks)
        differences = values - base_values
        results[key] = (
            Score(whole.metric, value, *interval(values)),
            Difference(whole.metric, value - base, *interval(differences), p_value(differences, value - base)),
        )
    return [results[tuple(picks)] for picks in systems]


def _measure(metric: str, predictions: Sequence[str], references: References) -> _Measure:
    if metric not in METRICS:
        raise UserError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    _require_pairs(metric, predictions, references)
    if metric == "bleu":
        statistics, signature = bleu_statistics(predictions, references)
        return _Measure("BLEU", statistics, bleu_from_sums, signature)
    mean = _mean_of_first(len(predictions))
    if metric == "rouge":
        statistics, signature = rouge_statistics(predictions, references)
        extra = dict(zip(ROUGE_NAMES[1:], statistics.mean(axis=0)[1:].tolist(), strict=True))
        return _Measure("ROUGE-L", statistics, mean, signature, extra)
    equal = [prediction in tuple(several) for prediction, several in zip(predictions, references, strict=True)]
    return _Measure("agreement", 100.0 * np.array(equal, dtype=float)[:, None], mean)


def _mean_of_first(count: int) -> Callable[[np.ndarray], np.ndarray]:
    """The mean of the first statistic, given sums over `count` examples."""
    return lambda sums: sums[..., 0] / count


def _require_pairs(metric: str, predictions: Sequence[str], references: References) -> None:
    if not predictions:
        raise UserError(f"{metric} needs at least one prediction, got none; check dataset.limit")
    if len(predictions) != len(references):
        raise UserError(f"{metric} needs references for {len(predictions)} predictions, got {len(references)}")
    for index, (prediction, several) in enumerate(zip(predictions, references, strict=True)):
        if not isinstance(prediction, str):
            raise UserError(f"{metric}: prediction {index} must be text, got {type(prediction).__name__}")
        if isinstance(several, str):
            raise UserError(f"{metric}: references of example {index} must be a list of texts, got one text")
        if not several:
            raise UserError(f"{metric}: example {index} has no reference; set dataset.metric=agreement")
