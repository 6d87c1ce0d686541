"""The quality of outputs with a confidence interval over examples, and the quality difference of
two systems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

from bild_lab.engine.models.checkpoint.chat import without_thoughts
from bild_lab.errors import UserError
from bild_lab.lab.metrics.bootstrap import (
    MetricSums,
    central_interval,
    independent,
    least_p_value,
    mean_metric,
)
from bild_lab.lab.metrics.external_metrics import TRIED_EXAMPLES
from bild_lab.lab.metrics.non_inferiority import non_inferiority
from bild_lab.lab.metrics.numerals import ends_within_a_number, last_number
from bild_lab.lab.metrics.programs import require_permission, require_programs
from bild_lab.lab.metrics.proportions import (
    are_right_or_wrong,
    difference_interval,
    gained_and_lost,
    share_interval,
    two_sided_p_value,
)
from bild_lab.lab.metrics.text_metrics import (
    AGREEMENT,
    PASS_AT_1,
    ROUGE,
    metric_named,
    needs_references,
)
from bild_lab.lab.metrics.writing import BY_SCRIPT, References, Writing
from bild_lab.lab.schema.numbers import POINTS_SCALE, Quality, scale_of

NO_REFERENCE = ("",)  # what a metric of tokens gets
NUMERIC = "numeric"
NEEDS_WORDS = ("bleu", "chrf", "ter", "rouge", *ROUGE)  # an empty reference has none
# the number of tokens of each text, and the log-probability that the target gives them; for the
# method and for the baseline
Tokens = tuple[Sequence[tuple[int, float | None]] | None, Sequence[tuple[int, float | None]] | None]


@dataclass(frozen=True)
class Difference:
    """Predictions minus baseline in the metric's unit, with its paired 95 % interval: by the
    bootstrap, or of shares where each example is right or wrong (`proportions`).

    p_value: two-sided; 1 for identical outputs.
    """

    metric: str
    value: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class MetricScore:
    """Outputs scored and compared. difference: None without a baseline. per_example: None if the
    metric has no such.
    """

    score: Quality
    difference: Difference | None
    per_example: tuple[float, ...] | None


@dataclass(frozen=True)
class Scoring:
    """How a sweep's outputs are scored.

    metrics: by their names in the configuration; the first leads. run_code: whether pass_at_1 may
    run programs.
    writing: how the references are written. margin: of the test whether the leading metric is no
    worse than the baseline's, in its unit; None: no test.
    """

    metrics: tuple[str, ...]
    run_code: bool = False
    writing: Writing = BY_SCRIPT
    margin: float | None = None

    def fitted(self, references: References) -> Scoring:
        """The scoring for these references of all examples.

        Raises UserError, before a text is decoded, where a metric cannot fit.

        Every example must have references that the metric can use, and each metric is called once,
        on a reference.
        """
        metrics = [metric for metric in self.metrics if needs_references(metric)]
        if not metrics:
            return self
        fitting = replace(self, writing=self.writing.of(references))
        for metric in metrics:
            require_references(metric, references, fitting.writing)
            if metric == PASS_AT_1:
                require_programs(references)
            else:
                tried_references = tuple(map(tuple, references[:TRIED_EXAMPLES]))
                require_metric_works(metric, tried_references, fitting.writing)
        return fitting

    @property
    def lead(self) -> str:
        """The metric that tables and figures show."""
        return self.metrics[0]

    def score_outputs(
        self,
        predictions: Sequence[str],
        baseline: Sequence[str] | None,
        references: References,
        seed: int,
        tokens: Tokens = (None, None),
        conversations: Sequence[int] | None = None,
    ) -> Mapping[str, MetricScore]:
        """Every metric of the outputs, and the paired difference from the baseline's.

        tokens: those of the predictions and of the baseline's texts, for metrics of tokens.
        conversations: as in `score_with_baseline`.
        """
        scores = {}
        for metric in self.metrics:
            sums_of_text = metric_named(metric).of_tokens
            outputs, baseline_outputs, expected = predictions, baseline, references
            if sums_of_text is not None:
                outputs, baseline_outputs = (
                    None if texts is None else [sums_of_text(*text) for text in texts]
                    for texts in tokens
                )
                expected = [NO_REFERENCE] * len(outputs)
            elif metric == AGREEMENT:
                expected = [[text] for text in baseline or []]
            scores[metric] = score_with_baseline(
                metric,
                outputs,
                baseline_outputs,
                expected,
                seed=seed,
                run_code=self.run_code,
                writing=self.writing,
                margin=self.margin if metric == self.lead else None,
                conversations=conversations,
            )
        return scores


def require_references(metric: str, references: References, writing: Writing) -> None:
    """Raise UserError for an example without references, and one whose references no text could
    equal.
    """
    for index, example_references in enumerate(references):
        if not example_references:
            raise UserError(
                f"{metric}: example {index} has no references; leave it out of the data, or set "
                "dataset.metric=agreement"
            )
        if metric in NEEDS_WORDS and not any(text.strip() for text in example_references):
            raise UserError(
                f"{metric}: the reference of example {index} is empty; leave it out of the data, or"
                " choose dataset.metric=exact_match, by which an empty text can be right"
            )
        if metric == NUMERIC:
            _require_number(index, example_references, writing.decimal_comma)


def _require_number(index: int, references: Sequence[str], decimal_comma: bool) -> None:
    """Raise UserError for references that hold no number, and for one whose last number is only a
    part of what is meant: the 3 of 10^3 would be right for 2^3, too.
    """
    remedy = "leave it out of the data, or choose dataset.metric=exact_match"
    if all(last_number(text, decimal_comma) is None for text in references):
        raise UserError(
            f"{NUMERIC}: the reference of example {index} holds no number, got"
            f" {references[0]!r:.60}; {remedy}"
        )
    for text in references:
        if ends_within_a_number(text, decimal_comma):
            raise UserError(
                f"{NUMERIC}: the reference of example {index} ends within a mixed number, a date, a"
                f" ratio or a power, of which the last number alone would count, got {text[-60:]!r}; write a"
                f" decimal number, {remedy}"
            )


@lru_cache(maxsize=8)
def require_metric_works(
    metric: str, references: tuple[tuple[str, ...], ...], writing: Writing
) -> None:
    """Score the first reference of each example: what a metric cannot do shows before anything is
    decoded.
    """
    metric_sums(
        metric,
        [example_references[0] for example_references in references],
        references,
        False,
        writing,
    )


def score(
    metric: str,
    predictions: Sequence[str],
    references: References,
    seed: int = 0,
    run_code: bool = False,
    writing: Writing = BY_SCRIPT,
) -> Quality:
    """Score outputs against one or more references each, by a metric of `METRICS` or
    `evaluate:NAME_OR_PATH`.

    Raises UserError for an unknown metric, a prediction without a list of references, programs that
    may not run, and a metric that does not fit the references' language.
    """
    return score_with_baseline(metric, predictions, None, references, seed, run_code, writing).score


def score_with_baseline(
    metric: str,
    predictions: Sequence[str],
    baseline: Sequence[str] | None,
    references: References,
    seed: int = 0,
    run_code: bool = False,
    writing: Writing = BY_SCRIPT,
    margin: float | None = None,
    conversations: Sequence[int] | None = None,
) -> MetricScore:
    """`score`, and how much better (positive) or worse the predictions are than the baseline's,
    paired by example.

    margin: also test whether they are no worse by so much, in the metric's unit; None: no test.
    conversations: of which each example is a turn, as `conversations_of` numbers them; None: of
    none. Raises UserError as `score` does.
    """
    measured = metric_sums(metric, predictions, references, run_code, writing)
    if baseline is None:
        return _metric_score(measured, None, seed, conversations=conversations)
    same = list(baseline) == list(predictions)  # a lossless policy has the baseline's texts
    return _metric_score(
        measured,
        measured if same else metric_sums(metric, baseline, references, run_code, writing),
        seed,
        margin,
        conversations,
        different=count_different(predictions, baseline, conversations),
    )


def score_values(
    metric: str,
    values: Sequence[float],
    baseline: Sequence[float] | None = None,
    *,
    seed: int = 0,
    margin: float | None = None,
    conversations: Sequence[int] | None = None,
    bounded: bool = False,
    different: int | None = None,
) -> MetricScore:
    """`score_with_baseline` from the stored values of single examples. metric: its shown name.
    bounded: whether it gives every text a value from 0 to 100. different: how many independent
    examples have another text than the baseline's; None: as many as have another value.
    """
    measured = replace(mean_metric(metric, values), bounded=bounded)
    if baseline is None:
        return _metric_score(measured, None, seed, conversations=conversations)
    return _metric_score(
        measured,
        mean_metric(metric, baseline),
        seed,
        margin,
        conversations,
        different=count_different(values, baseline, conversations)
        if different is None
        else different,
    )


def score_pool(
    metric: str,
    pool: Sequence[str],
    references: References,
    systems: Sequence[Sequence[int]],
    baseline: Sequence[int],
    seed: int = 0,
    run_code: bool = False,
    writing: Writing = BY_SCRIPT,
    margin: float | None = None,
    conversations: Sequence[int] | None = None,
) -> list[tuple[Quality, Difference]]:
    """Scores and differences of many systems whose texts repeat: each text of the pool is scored
    once.

    pool: texts, each with its own references. systems, baseline: for each example, which text of
    the pool it gets. Systems with the same texts share their intervals. margin, conversations: as
    in `score_with_baseline`.
    """
    sums = metric_sums(metric, pool, references, run_code, writing)
    compared_with = _resampled(sums, seed, baseline, conversations)
    scores: dict[tuple[int, ...], tuple[Quality, Difference]] = {}
    for picks in map(tuple, systems):
        if picks in scores:
            continue
        system = _resampled(sums, seed, picks, conversations)
        different = count_different(picks, baseline, conversations)
        scores[picks] = system.beside(compared_with, different, margin, sums.bounded)
    return [scores[tuple(picks)] for picks in systems]


@dataclass(frozen=True)
class _System:
    """A metric of one system, and of its resamples.

    values: of single examples, in points; None if the metric has no such. count: of independent
    examples. conversations: as in `score_with_baseline`.
    """

    metric: str
    value: float
    resampled: Float[np.ndarray, " resamples"]
    values: Sequence[float] | None
    count: int
    conversations: Sequence[int] | None

    @property
    def quality(self) -> Quality:
        """The value with its 95 % interval."""
        if self._has_shares(self.values):
            low, high = share_interval(self.values)
        else:
            low, high = central_interval(self.resampled)
        return Quality(metric=self.metric, value=self.value, low=low, high=high)

    def beside(
        self, baseline: _System, different: int, margin: float | None, bounded: bool
    ) -> tuple[Quality, Difference]:
        """The quality compared with a baseline's, and the difference. different: as in
        `difference_from`. margin, bounded: as in `non_inferiority`; without a margin nothing is
        tested.
        """
        difference = self.difference_from(baseline, different)
        tested = None
        if margin is not None:
            tested = non_inferiority(
                self.values,
                baseline.values,
                differences=self._paired_differences(baseline),
                margin=margin,
                count=self.count,
                different=different,
                bounded=bounded,
                conversations=self.conversations,
            )
        compared_quality = replace(
            self.quality,
            baseline=baseline.value,
            difference=difference.value,
            difference_low=difference.low,
            difference_high=difference.high,
            p_value=difference.p_value,
            non_inferiority=tested,
        )
        return compared_quality, difference

    def difference_from(self, baseline: _System, different: int) -> Difference:
        """This system minus the baseline. different: how many independent examples have another text
        than the baseline's.
        """
        difference = self.value - baseline.value
        if not self._has_shares(self.values, baseline.values):
            if None not in (self.values, baseline.values):  # texts that differ may be as good
                different = count_different(self.values, baseline.values, self.conversations)
            differences = self._paired_differences(baseline)
            low, high = central_interval(differences)
            by_chance = max(p_value(differences, difference), 2 * least_p_value(different))
            by_chance = min(1.0, by_chance)
            return Difference(self.metric, difference, low, high, by_chance)
        counts = (*gained_and_lost(self.values, baseline.values), self.count)
        # texts that are all the baseline's are no sample of a difference: there is none
        low, high = difference_interval(*counts) if different or any(counts[:2]) else (0.0, 0.0)
        return Difference(self.metric, difference, low, high, two_sided_p_value(*counts))

    def _has_shares(self, *systems: Sequence[float] | None) -> bool:
        """Whether the metric is a share of independent examples that are right, for these systems."""
        return self.conversations is None and None not in systems and are_right_or_wrong(*systems)

    def _paired_differences(self, baseline: _System) -> Float[np.ndarray, " resamples"]:
        """The differences of resamples."""
        # one may be a mean where the other is not; their first draws are the same
        count = min(len(self.resampled), len(baseline.resampled))
        return self.resampled[:count] - baseline.resampled[:count]


def _resampled(
    sums: MetricSums,
    seed: int,
    picks: Sequence[int] | None = None,
    conversations: Sequence[int] | None = None,
) -> _System:
    """A metric of these examples, of all if None, with its resamples."""
    values = sums.per_example
    if scale_of(sums.metric) is not POINTS_SCALE:  # a length of 100 tokens is no right example
        values = None
    if values is not None and picks is not None:
        values = [values[pick] for pick in picks]
    return _System(
        sums.metric,
        sums.value(picks),
        sums.resampled(seed, picks, conversations),
        values,
        independent(sums.count if picks is None else len(picks), conversations),
        conversations,
    )


def count_different(
    outputs: Sequence[Any], baseline: Sequence[Any], conversations: Sequence[int] | None
) -> int:
    """How many independent examples have another output than the baseline's."""
    places = [place for place, output in enumerate(outputs) if output != baseline[place]]
    return len(places if conversations is None else {conversations[place] for place in places})


def _metric_score(
    method: MetricSums,
    baseline: MetricSums | None,
    seed: int,
    margin: float | None = None,
    conversations: Sequence[int] | None = None,
    different: int = 0,
) -> MetricScore:
    """The score of a metric. different: how many independent examples differ from the baseline's."""
    system = _resampled(method, seed, conversations=conversations)
    signature = None
    if method.signature:
        signature = f"{method.signature}|bs:{method.resamples}|seed:{seed}"
    quality, difference = system.quality, None
    if baseline is not None:
        compared_with = _resampled(baseline, seed, conversations=conversations)
        quality, difference = system.beside(compared_with, different, margin, method.bounded)
    return MetricScore(replace(quality, signature=signature), difference, method.per_example)


def metric_sums(
    metric: str,
    predictions: Sequence[str],
    references: References,
    run_code: bool,
    writing: Writing = BY_SCRIPT,
) -> MetricSums:
    """The metric of these outputs. Of a model that thinks before it answers a reference is compared
    with the answer alone. Raises UserError as `score` does.
    """
    definition = metric_named(metric)
    if not predictions or len(predictions) != len(references) or any(map(_lacks_list, references)):
        raise UserError(
            f"{metric} needs a list of references for each of {len(predictions)} predictions, got"
            f" {references!r:.200}"
        )
    if definition.runs_code:
        require_permission(run_code)
    if needs_references(metric):
        predictions = list(map(_answer_of, predictions, references))
    return definition.of(predictions, references, writing)


def _lacks_list(example_references: Any) -> bool:
    """Whether an example has no references, or a text in their place, whose letters would be
    references.
    """
    return not example_references or isinstance(example_references, str)


def _answer_of(text: str, references: Sequence[str]) -> str:
    """A text without thoughts, unless a reference holds thoughts, too."""
    if any(without_thoughts(reference) != reference for reference in references):
        return text
    return without_thoughts(text)


def p_value(differences: Float[np.ndarray, " resamples"], observed: float) -> float:
    """Two-sided p-value: how often a difference centred on zero is at least as large as the
    observed difference.

    `sacrebleu` counts only larger differences, which gives 0.001 for two identical systems. Here
    they get 1. A difference of NaN, as of texts without a token, may be anything.
    """
    # equal differences must stay equal after rounding
    smaller = np.abs(differences - observed) < abs(observed) - 1e-9
    return float((len(differences) - smaller.sum() + 1) / (len(differences) + 1))
