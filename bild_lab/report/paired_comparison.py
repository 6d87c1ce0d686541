"""Points that two sweeps share, compared: which side is faster, which is better, and what may be
chance.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bild_lab.errors import UserError
from bild_lab.lab.metrics.quality import (
    NO_REFERENCE,
    Difference,
    MetricScore,
    count_different,
    score_values,
    score_with_baseline,
)
from bild_lab.lab.metrics.text_metrics import AGREEMENT, metric_named
from bild_lab.lab.metrics.writing import Writing
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.numbers import SIGNIFICANT, NonInferiority, Quality, Speedup
from bild_lab.lab.schema.questions import questions_of, source_ids
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import (
    are_enough,
    conversations_of,
    paired_ratio,
    with_clock_noise,
)
from bild_lab.report.matching import MatchedPoint, differences, point_text

Seconds = Sequence[Sequence[float] | None]  # of each example's repeats
SACREBLEU_SEED = 12345  # with it, intervals of BLEU are those of `sacrebleu --paired-bs`
NOT_COMPARED, SAME, UNCLEAR, TOO_FEW = "not compared", "no difference", "unclear", "too few"
# keys of the setting, and the commit, that may differ where a baseline is the same
METHOD_KEYS = {
    "commit",
    "target",
    "draft",
    "second_draft",
    "draft_revision",
    "second_draft_revision",
    "draft_weight_bits",
    "compile_drafter",
    "dataset",
    "split",
    "repeats",
    "warmup",
}


@dataclass(frozen=True)
class MetricComparison:
    """One metric of A and B over the examples that both decoded.

    metric: as shown. values: of A and of B. difference: B minus A. non_inferiority: whether B is no
    worse than A by a margin; None where that was not tested. enough: whether there are enough
    examples for a verdict.
    """

    metric: str
    values: tuple[float | None, float | None]
    difference: Difference | None
    non_inferiority: NonInferiority | None = None
    enough: bool = True

    @property
    def verdict(self) -> str:
        """Whether B is better or worse: chance gives a difference this large in fewer than 5 of 100
        samples. Too few examples say neither.
        """
        if self.difference is None:
            return NOT_COMPARED
        if self.difference.p_value >= SIGNIFICANT:
            return SAME
        if not self.enough:
            return TOO_FEW
        return "better" if self.difference.value > 0 else "worse"


@dataclass(frozen=True)
class PointComparison:
    """A pair compared over the examples that both sides decoded."""

    pair: MatchedPoint
    n_examples: int  # that both sides decoded
    n_decoded: tuple[int, int]  # how many A and B have
    speedups: tuple[Speedup, Speedup]  # of A and B over these examples
    latency_ratio: Speedup | None  # B's total latency divided by A's; below 1 if B is faster
    baseline_latency_ratio: Speedup | None  # the same ratio for the baselines timed with them
    not_compared_reason: str | None  # why latencies are not compared
    metric_comparisons: tuple[MetricComparison, ...]  # every metric, the leading one first
    # the first ratio over the second, in which a machine that has become slower does not count;
    # with a baseline of the same code and setting it is also `latency_ratio`
    relative_latency_ratio: Speedup | None = None
    enough_answered: bool = True  # whether enough of the examples were timed for a verdict
    clock_is_known: bool = True  # whether the timings of both say how far the clock may be off

    @property
    def speed_verdict(self) -> str:
        """Whether B is faster or slower: the 95 % interval excludes 1. Unclear if the speedups
        clearly say the opposite; too few examples say neither.
        """
        if self.latency_ratio is None:
            return NOT_COMPARED
        verdict = _verdict_of(self.latency_ratio)
        if verdict != SAME and not (self.enough_answered and self.clock_is_known):
            return TOO_FEW
        relative_verdict = _verdict_of(self.relative_latency_ratio or self.latency_ratio)
        if SAME not in (verdict, relative_verdict) and verdict != relative_verdict:
            return UNCLEAR
        return verdict

    @property
    def quality(self) -> MetricComparison:
        """The leading metric."""
        return self.metric_comparisons[0]


def _verdict_of(ratio: Speedup) -> str:
    if ratio.high < 1:
        return "faster"
    return "slower" if ratio.low > 1 else SAME


def compare_point(
    pair: MatchedPoint,
    examples_a: Sequence[MeasuredExample],
    examples_b: Sequence[MeasuredExample],
    references: Mapping[tuple[str, int], Sequence[str]] | None,
    same: Collection[tuple[str, int]] | None = None,
    margin: float | None = None,
) -> PointComparison:
    """Compare a pair over the examples that A and B both have, paired by their keys.

    references: of each example, by its key; None if they are not known. Agreement with the
    baseline's outputs needs none. same: the keys that mean the same text in both; None if all do.
    margin: also test whether B is no worse than A by so much of the leading metric.
    Raises UserError without a shared example.
    """
    by_key_a = {example.key: example for example in examples_a}
    by_key_b = {example.key: example for example in examples_b}
    keys = [key for key in by_key_a if key in by_key_b and (same is None or key in same)]
    if not keys:
        raise UserError(
            f"{point_text(pair.a)}: A and B have no example in common, of {len(by_key_a)} and"
            f" {len(by_key_b)}; measure one of them again with the dataset keys of the other"
        )
    key_references = None if references is None else [references[key] for key in keys]

    def side(result: Result, by_key: Mapping[tuple[str, int], MeasuredExample]) -> _Side:
        examples = [by_key[key] for key in keys]
        return _Side(result, examples, len(keys) == len(by_key), key_references)

    a, b = side(pair.a, by_key_a), side(pair.b, by_key_b)
    further = [name for name in pair.a.further_qualities if name in pair.b.further_qualities]
    answered = [
        place
        for place, (in_a, in_b) in enumerate(zip(a.examples, b.examples, strict=True))
        if not (in_a.failed or in_b.failed)
    ]
    reason = _why_not_comparable(pair, answered)
    questions = questions_of(source_ids(a.examples))
    answered_questions = [questions[place] for place in answered]
    latency_ratios = {"latency_ratio": None, "baseline_latency_ratio": None}
    if reason is None:
        latency_ratios = _latency_ratios(pair, a, b, answered, conversations_of(answered_questions))
    return PointComparison(
        pair=pair,
        n_examples=len(keys),
        n_decoded=(len(by_key_a), len(by_key_b)),
        speedups=(a.speedup, b.speedup),
        **latency_ratios,
        not_compared_reason=reason,
        metric_comparisons=tuple(
            _compare_metric(metric, a, b, margin if place == 0 else None)
            for place, metric in enumerate((pair.a.setting.metric, *further))
        ),
        enough_answered=_are_enough(answered_questions),
        clock_is_known=pair.a.clock_is_known and pair.b.clock_is_known,
    )


def _latency_ratios(
    pair: MatchedPoint,
    a: _Side,
    b: _Side,
    answered: Sequence[int],
    conversations: Sequence[int] | None,
) -> dict[str, Speedup | None]:
    """Fields of a PointComparison: how long B took in times of A. answered: places of the examples
    that both sides have texts of. conversations: of these.
    """
    ratio = partial(_ratio, conversations=conversations, clocks=[pair.a, pair.b])
    seconds_a, seconds_b = a.latency_s(answered), b.latency_s(answered)
    baseline_a, baseline_b = a.baseline_s(answered), b.baseline_s(answered)
    relative_latency = ratio([seconds_b, baseline_a], [seconds_a, baseline_b])
    same_baseline = set(differences([pair])) <= METHOD_KEYS
    latency = relative_latency
    if relative_latency is None or not same_baseline:
        latency = ratio([seconds_b], [seconds_a])
    return {
        "latency_ratio": latency,
        "baseline_latency_ratio": ratio([baseline_b], [baseline_a]),
        "relative_latency_ratio": relative_latency,
    }


def _are_enough(ids: Sequence[str]) -> bool:
    """Whether intervals over these examples are wide enough to call one side better. Turns of a
    conversation count once. ids: as `source_ids` gives them.
    """
    return are_enough(len(set(questions_of(ids))))


@dataclass(frozen=True)
class _Side:
    """A result with the examples that the other side has too.

    has_all: whether these are all that it decoded.
    """

    result: Result
    examples: Sequence[MeasuredExample]
    has_all: bool
    references: Sequence[Sequence[str]] | None

    def latency_s(self, places: Sequence[int]) -> Seconds:
        return [self.examples[place].latency_s for place in places]

    def baseline_s(self, places: Sequence[int]) -> Seconds:
        return [self.examples[place].baseline_latency_s for place in places]

    @property
    def speedup(self) -> Speedup:
        """The result's own, or that over these examples alone if it decoded more."""
        if self.has_all:
            return self.result.speedup
        answered = [place for place, example in enumerate(self.examples) if not example.failed]
        questions = questions_of(source_ids(self.examples))
        conversations = conversations_of([questions[place] for place in answered])
        seconds, baseline_s = self.latency_s(answered), self.baseline_s(answered)
        return _ratio([baseline_s], [seconds], conversations, [self.result]) or Speedup()

    @property
    def writing(self) -> Writing:
        """How the references are written, by the setting of the point."""
        setting = self.result.setting
        language = setting.get("language") or setting.get("target_language")
        return Writing(setting.get("tokenize"), language)

    def quality(self, metric: str) -> Quality:
        return self.result.further_qualities.get(metric, self.result.quality)

    def judged(
        self, metric: str, baseline: _Side | None = None, margin: float | None = None
    ) -> MetricScore | None:
        """These outputs, beside those of a baseline if there is one, from their stored values or
        else from their texts. None if neither values nor references are known.

        margin: as in `score_with_baseline`.
        """
        sides = [self.examples] if baseline is None else [self.examples, baseline.examples]
        resampling = {
            "seed": SACREBLEU_SEED,
            "margin": margin,
            "conversations": conversations_of(source_ids(self.examples)),
        }
        texts = [[example.prediction for example in side] for side in sides]
        values = _stored_values(metric, sides)
        if values is not None:
            shown, bounded = self.quality(metric).metric, metric_named(metric).bounded
            different = count_different(texts[0], texts[-1], resampling["conversations"])
            return score_values(shown, *values, bounded=bounded, different=different, **resampling)
        token_metric = metric_named(metric).of_tokens
        if token_metric is not None:
            outputs = [
                [token_metric(len(example.token_ids), example.log_probability) for example in side]
                for side in sides
            ]
            references = [NO_REFERENCE] * len(self.examples)
            return score_with_baseline(metric, *_with_baseline(outputs), references, **resampling)
        if self.references is None:
            return None
        return score_with_baseline(
            metric,
            *_with_baseline(texts),
            self.references,
            writing=self.writing,
            **resampling,
        )


def _stored_values(
    metric: str, sides: Sequence[Sequence[MeasuredExample]]
) -> list[list[float]] | None:
    """The metric's value of each example of each side; None if one of them does not have it."""
    if all(metric in (example.scores or {}) for side in sides for example in side):
        return [[example.scores[metric] for example in side] for side in sides]
    if metric == AGREEMENT:  # each example equals its own baseline's output or not
        return [
            [100.0 * (example.prediction == example.baseline_prediction) for example in side]
            for side in sides
        ]
    return None


def _with_baseline(outputs: Sequence[list[Any]]) -> tuple[list[Any], list[Any] | None]:
    """The outputs of one side, and those of its baseline, None without one."""
    return outputs[0], outputs[1] if len(outputs) > 1 else None


def _compare_metric(metric: str, a: _Side, b: _Side, margin: float | None) -> MetricComparison:
    """A metric of both sides: the results' own values, or those of these examples alone if more
    were decoded.
    """
    against_a = b.judged(metric, a, margin)
    return MetricComparison(
        metric=a.quality(metric).metric,
        values=(_metric_value(metric, a), _metric_value(metric, b)),
        difference=None if against_a is None else against_a.difference,
        non_inferiority=None if against_a is None else against_a.score.non_inferiority,
        enough=_are_enough(source_ids(a.examples)),
    )


def _metric_value(metric: str, side: _Side) -> float | None:
    if side.has_all:
        return side.quality(metric).value
    judged = side.judged(metric)
    return None if judged is None else judged.score.value


def _ratio(
    numerators: Sequence[Seconds],
    denominators: Sequence[Seconds],
    conversations: Sequence[int] | None,
    clocks: Sequence[Result],
) -> Speedup | None:
    """A product of total seconds over another; the median of an example's repeats counts.

    clocks: the results that the seconds are of; of one in batches the clock's error is added. None
    without an example, and if one was not timed.
    """
    every_seconds = (*numerators, *denominators)
    if not all(seconds and all(seconds) for seconds in every_seconds):
        return None
    ratio = paired_ratio(
        [_medians(seconds) for seconds in numerators],
        [_medians(seconds) for seconds in denominators],
        conversations=conversations,
    )
    noises = [result.speedup.noise for result in clocks if result.in_batches]
    return with_clock_noise(ratio, [noise for noise in noises if noise is not None])


def _medians(seconds: Seconds) -> np.ndarray:
    """The median of each example's repeats, of shape (examples, 1)."""
    return np.array([[float(np.median(repeats))] for repeats in seconds])


def _why_not_comparable(pair: MatchedPoint, answered: Sequence[int]) -> str | None:
    """Why the latencies of A and B cannot be compared; None if they can. answered: places of the
    examples that both sides have texts of.
    """
    if not (pair.a.timed and pair.b.timed):
        return "replayed texts were not timed"
    machine_a, machine_b = _machine(pair.a), _machine(pair.b)
    if machine_a != machine_b:
        return f"different hardware: {machine_a}, {machine_b}"
    if pair.a.environment.shared_device or pair.b.environment.shared_device:
        return "timed beside other jobs on the same device"
    return None if answered else "of every text one side's server failed to give it"


def _machine(result: Result) -> str:
    device, _, _ = result.setting.device.partition(":")
    return f"{device} {result.setting.hardware}"
