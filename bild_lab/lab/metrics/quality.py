"""The quality of outputs with a confidence interval over examples, and the quality difference of two systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from bild_lab.errors import UserError
from bild_lab.lab.metrics.answers import exact_matches, numeric_matches
from bild_lab.lab.metrics.bleu import bleu_from_sums, bleu_statistics
from bild_lab.lab.metrics.bootstrap import interval, p_value
from bild_lab.lab.metrics.evaluate_module import PREFIX, evaluate_measure
from bild_lab.lab.metrics.measures import Mean, Measure, Sums
from bild_lab.lab.metrics.programs import passes
from bild_lab.lab.metrics.rouge import NAMES as ROUGE_NAMES
from bild_lab.lab.metrics.rouge import rouge_statistics
from bild_lab.lab.metrics.sacrebleu_counts import CHRF, TER, sacrebleu_statistics

METRICS = ("bleu", "chrf", "ter", "rouge", "exact_match", "numeric", "pass_at_1", "agreement")
SACREBLEU = {"chrf": CHRF, "ter": TER}

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
class Judged:
    """Outputs scored and compared. difference: None without a baseline. per_example: None if the metric has no such."""

    score: Score
    difference: Difference | None
    per_example: tuple[float, ...] | None


def score(
    metric: str, predictions: Sequence[str], references: References, *, seed: int = 0, run_code: bool = False
) -> Score:
    """Score outputs against one or more references each.

    "bleu" is sacrebleu's corpus BLEU, "chrf" its chrF and "ter" 100 minus its TER, "rouge" the mean ROUGE-L f-measure
    with stemming. The others are percentages: "exact_match" of the predictions that equal a reference, "numeric" of
    those whose last number is the reference's, "pass_at_1" of those whose program passes its tests (only with
    `run_code`), "agreement" of those that equal a baseline's output. "evaluate:NAME_OR_PATH" is a metric of `evaluate`.
    Raises UserError for an unknown metric, no predictions, or an example without references.
    """
    return judge(metric, predictions, None, references, seed=seed, run_code=run_code).score


def compare(
    metric: str,
    predictions: Sequence[str],
    baseline: Sequence[str],
    references: References,
    *,
    seed: int = 0,
    run_code: bool = False,
) -> Difference:
    """How much better (positive) or worse (negative) the predictions are than the baseline's, paired by example.

    Raises UserError as `score` does.
    """
    return judge(metric, predictions, baseline, references, seed=seed, run_code=run_code).difference


def judge(
    metric: str,
    predictions: Sequence[str],
    baseline: Sequence[str] | None,
    references: References,
    *,
    seed: int = 0,
    run_code: bool = False,
) -> Judged:
    """`score` and `compare` of the same predictions, which are measured once. Raises UserError as they do."""
    ours = _measure(metric, predictions, references, run_code)
    if baseline is None:
        return _judged(ours, None, seed)
    same = list(baseline) == list(predictions)  # as those of a lossless policy
    return _judged(ours, ours if same else _measure(metric, baseline, references, run_code), seed)


def judge_values(
    metric: str, values: Sequence[float], baseline: Sequence[float] | None = None, *, seed: int = 0
) -> Judged:
    """The same from the values of single examples, as they were stored. metric: as shown."""
    return _judged(Mean(metric, values), None if baseline is None else Mean(metric, baseline), seed)


def score_pool(
    metric: str,
    pool: Sequence[str],
    references: References,
    systems: Sequence[Sequence[int]],
    baseline: Sequence[int],
    *,
    seed: int = 0,
    run_code: bool = False,
) -> list[tuple[Score, Difference]]:
    """`score` and `compare` of many systems whose texts repeat: each text of the pool is scored once.

    pool: texts, each with its own references. systems, baseline: for each example, which text of the pool it gets.
    Systems with the same texts share their intervals.
    """
    whole = _measure(metric, pool, references, run_code)
    found: dict[tuple[int, ...], tuple[float, Float[np.ndarray, " resamples"]]] = {}

    def resampled(picks: Sequence[int]) -> tuple[float, Float[np.ndarray, " resamples"]]:
        if (key := tuple(picks)) not in found:
            found[key] = whole.value(picks), whole.resampled(seed, picks)
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


def require_metric(metric: str) -> None:
    """Raise UserError unless there is such a metric. Whether `evaluate` has one is found out when it is loaded."""
    if metric not in METRICS and not (metric.startswith(PREFIX) and metric != PREFIX):
        raise UserError(f"metric must be one of {', '.join(METRICS)}, {PREFIX}NAME_OR_PATH, got {metric!r}")


def _score(measure: Measure, seed: int, values: Float[np.ndarray, " resamples"]) -> Score:
    signature = f"{measure.signature}|bs:{measure.resamples}|seed:{seed}" if measure.signature else None
    return Score(measure.metric, measure.value(), *interval(values), signature, measure.extra)


def _judged(ours: Measure, theirs: Measure | None, seed: int) -> Judged:
    values = ours.resampled(seed)
    scored = _score(ours, seed, values)
    if theirs is None:
        return Judged(scored, None, ours.per_example)
    others = theirs.resampled(seed)
    count = min(len(values), len(others))  # one may be a mean where the other is not; their first draws are the same
    value, differences = scored.value - theirs.value(), values[:count] - others[:count]
    difference = Difference(ours.metric, value, *interval(differences), p_value(differences, value))
    return Judged(scored, difference, ours.per_example)


def _measure(metric: str, predictions: Sequence[str], references: References, run_code: bool) -> Measure:
    require_metric(metric)
    _require_pairs(metric, predictions, references)
    if metric == "bleu":
        statistics, signature = bleu_statistics(predictions, references)
        return Sums("BLEU", statistics, bleu_from_sums, signature)
    if metric in SACREBLEU:
        return Sums(SACREBLEU[metric], *sacrebleu_statistics(SACREBLEU[metric], predictions, references))
    if metric == "rouge":
        statistics, signature = rouge_statistics(predictions, references)
        extra = dict(zip(ROUGE_NAMES[1:], statistics.mean(axis=0)[1:].tolist(), strict=True))
        return Mean("ROUGE-L", statistics[:, 0], signature, extra)
    if metric == "exact_match":
        return Mean("exact match", exact_matches(predictions, references))
    if metric == "numeric":
        return Mean("numeric match", numeric_matches(predictions, references))
    if metric == "pass_at_1":
        return Mean("pass@1", passes(predictions, references, run_code))
    if metric == "agreement":
        pairs = zip(predictions, references, strict=True)
        return Mean("agreement", [100.0 * (prediction in tuple(several)) for prediction, several in pairs])
    return evaluate_measure(metric, predictions, references)


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
