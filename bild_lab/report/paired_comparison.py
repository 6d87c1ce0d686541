"""Compare points of two sweeps, A and B: which side is faster, which is better, and what may be
chance.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bild_lab.engine.stop import before_stop
from bild_lab.errors import UserError
from bild_lab.lab.metrics.quality import (
    NO_REFERENCE,
    Difference,
    MetricScore,
    judge,
    judge_values,
)
from bild_lab.lab.metrics.text_metrics import AGREEMENT, metric_named
from bild_lab.lab.metrics.writing import Writing
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.numbers import Quality, Speedup
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import paired_ratio
from bild_lab.lab.store.hashing import plain_numbers

SIGNIFICANT = 0.05
SACREBLEU_SEED = 12345  # with it, intervals of BLEU are those of `sacrebleu --paired-bs`
NOT_COMPARED, SAME, UNCLEAR = "not compared", "no difference", "unclear"
# keys of the setting that the user does not choose, so they never distinguish two points of a sweep
DERIVED_KEYS = ("data", "weights", "code", "hardware")
# keys of the setting, and the commit, that may differ where a baseline is the same
METHOD_KEYS = {
    "commit",
    "target",
    "draft",
    "second_draft",
    "draft_weight_bits",
    "compile_drafter",
    "dataset",
    "split",
    "repeats",
    "warmup",
}


_LISTED_POINTS = 4  # points that a message names at most


@dataclass(frozen=True)
class MatchedPoint:
    """One point in A and in B.

    distinct: values of the setting that, besides policy and knobs, distinguish it from others.
    """

    a: Result
    b: Result
    distinct: dict[str, Any]


@dataclass(frozen=True)
class Matching:
    """The points that both A and B have, and those that only one of them has."""

    pairs: list[MatchedPoint]
    only_a: list[Result]
    only_b: list[Result]


@dataclass(frozen=True)
class MetricComparison:
    """One metric of A and B over the examples that both decoded.

    metric: as shown. values: of A and of B. difference: B minus A.
    """

    metric: str
    values: tuple[float | None, float | None]
    difference: Difference | None

    @property
    def verdict(self) -> str:
        """Whether B is better or worse: chance gives a difference this large in fewer than 5 of 100
        samples.
        """
        if self.difference is None:
            return NOT_COMPARED
        if self.difference.p_value >= SIGNIFICANT:
            return SAME
        return "better" if self.difference.value > 0 else "worse"


@dataclass(frozen=True)
class PointComparison:
    """A pair compared over the examples that both sides decoded.

    n_examples: how many these are. n_decoded: how many A and B have. speedups: of A and B over
    these examples. latency_ratio: B's total latency divided by A's; below 1 if B is faster.
    baseline_latency_ratio: the same ratio for the baselines timed with them. not_compared_reason:
    why latencies are not compared. metric_comparisons: every metric, the leading one first.
    relative_latency_ratio: the first ratio over the second, in which a machine that has become
    slower does not count; with a baseline of the same code and setting it is also `latency_ratio`.
    """

    pair: MatchedPoint
    n_examples: int
    n_decoded: tuple[int, int]
    speedups: tuple[Speedup, Speedup]
    latency_ratio: Speedup | None
    baseline_latency_ratio: Speedup | None
    not_compared_reason: str | None
    metric_comparisons: tuple[MetricComparison, ...]
    relative_latency_ratio: Speedup | None = None

    @property
    def speed_verdict(self) -> str:
        """Whether B is faster or slower: the 95 % interval excludes 1. Unclear if the speedups
        clearly say the opposite.
        """
        if self.latency_ratio is None:
            return NOT_COMPARED
        verdict = _verdict_of(self.latency_ratio)
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


def match_points(a: Sequence[Result], b: Sequence[Result]) -> Matching:
    """Pair the results of A and of B, each oldest first, by policy, knobs and other values that
    vary within A or B.

    Values that are constant within A and within B may differ between them, such as the precision or
    the code: they are what is compared. A knob that only one version of a policy has distinguishes
    points only if it varies. Of equal points the newest counts. Raises UserError if nothing
    matches, or if matching points have other datasets or metrics.
    """
    varying = list(_varying_keys(a) | _varying_keys(b))
    policies = {result.policy for result in [*a, *b]}
    knobs = {policy: _matched_knobs(policy, a, b) for policy in policies}

    def distinguishing(result: Result) -> dict[str, Any]:
        setting = flat_setting(result)
        return {key: setting.get(key) for key in varying}

    def key_of(result: Result) -> str:
        matched_knobs = {
            name: value for name, value in result.knobs.items() if name in knobs[result.policy]
        }
        return _comparable([result.policy, matched_knobs, distinguishing(result)])

    results_a = {key_of(result): result for result in a}
    results_b = {key_of(result): result for result in b}
    pairs = [
        MatchedPoint(result, results_b[key], distinguishing(result))
        for key, result in results_a.items()
        if key in results_b
    ]
    if not pairs:
        raise UserError(
            f"A and B have no point in common: A has {_point_list(results_a.values())}; B has"
            f" {_point_list(results_b.values())}; points match by policy and knobs"
        )
    for pair in pairs:
        _require_same_task(pair)
    only_a = [result for key, result in results_a.items() if key not in results_b]
    only_b = [result for key, result in results_b.items() if key not in results_a]
    return Matching(pairs, only_a, only_b)


def differences(pairs: Iterable[MatchedPoint]) -> dict[str, tuple[str, str]]:
    """What else differs between A and B: each such key of the setting, or the commit, with the
    values of both.

    Which examples they have is left out: `PointComparison` counts them.
    """
    values_a: dict[str, dict[str, None]] = {}  # the values of each key as texts, in their order
    values_b: dict[str, dict[str, None]] = {}
    for pair in pairs:
        setting_a = {**flat_setting(pair.a), "commit": pair.a.environment.git}
        setting_b = {**flat_setting(pair.b), "commit": pair.b.environment.git}
        for key in {**setting_a, **setting_b}:
            if key in pair.distinct or key in ("data", "n_examples"):
                continue
            value_a = plain_numbers(setting_a.get(key))
            value_b = plain_numbers(setting_b.get(key))
            if value_a != value_b:
                values_a.setdefault(key, {})[str(value_a)] = None
                values_b.setdefault(key, {})[str(value_b)] = None
    return {key: (", ".join(values_a[key]), ", ".join(values_b[key])) for key in values_a}


def compare_point(
    pair: MatchedPoint,
    examples_a: Sequence[MeasuredExample],
    examples_b: Sequence[MeasuredExample],
    references: Mapping[tuple[str, int], Sequence[str]] | None,
    same: Collection[tuple[str, int]] | None = None,
) -> PointComparison:
    """Compare a pair over the examples that A and B both have, paired by their keys.

    references: of each example, by its key; None if they are not known. Agreement with the
    baseline's outputs needs none. same: the keys that mean the same text in both; None if all do.
    Raises UserError without a shared example.
    """
    by_key_a = {example.key: example for example in examples_a}
    by_key_b = {example.key: example for example in examples_b}
    keys = [key for key in by_key_a if key in by_key_b and (same is None or key in same)]
    if not keys:
        raise UserError(
            f"{_point_text(pair.a)}: A and B have no example in common, of {len(by_key_a)} and"
            f" {len(by_key_b)}; measure one of them again with the dataset keys of the other"
        )
    key_references = None if references is None else [references[key] for key in keys]

    def side(result: Result, by_key: Mapping[tuple[str, int], MeasuredExample]) -> _Side:
        examples = [by_key[key] for key in keys]
        return _Side(result, examples, len(keys) == len(by_key), key_references)

    a, b = side(pair.a, by_key_a), side(pair.b, by_key_b)
    further = [name for name in pair.a.further_qualities if name in pair.b.further_qualities]
    reason = _why_not_comparable(pair)
    latency = baseline_latency = relative_latency = None
    if not reason:
        baseline_latency = _ratio([b.baseline_s], [a.baseline_s])
        relative_latency = _ratio([b.latency_s, a.baseline_s], [a.latency_s, b.baseline_s])
        same_baseline = set(differences([pair])) <= METHOD_KEYS
        if relative_latency is not None and same_baseline:
            latency = relative_latency
        else:
            latency = _ratio([b.latency_s], [a.latency_s])
    return PointComparison(
        pair=pair,
        n_examples=len(keys),
        n_decoded=(len(by_key_a), len(by_key_b)),
        speedups=(a.speedup, b.speedup),
        latency_ratio=latency,
        baseline_latency_ratio=baseline_latency,
        not_compared_reason=reason,
        metric_comparisons=tuple(
            _compare_metric(metric, a, b) for metric in (pair.a.setting.metric, *further)
        ),
        relative_latency_ratio=relative_latency,
    )


@dataclass(frozen=True)
class _Side:
    """A result with the examples that the other side has too.

    has_all: whether these are all that it decoded.
    """

    result: Result
    examples: Sequence[MeasuredExample]
    has_all: bool
    references: Sequence[Sequence[str]] | None

    @property
    def latency_s(self) -> list[Sequence[float]]:
        return [example.latency_s for example in self.examples]

    @property
    def baseline_s(self) -> list[Sequence[float] | None]:
        return [example.baseline_latency_s for example in self.examples]

    @property
    def speedup(self) -> Speedup:
        """The result's own, or that over these examples alone if it decoded more."""
        if self.has_all:
            return self.result.speedup
        return _ratio([self.baseline_s], [self.latency_s]) or Speedup()

    @property
    def writing(self) -> Writing:
        """How the references are written, by the setting of the point."""
        setting = self.result.setting
        language = setting.get("language") or setting.get("target_language")
        return Writing(setting.get("tokenize"), language)

    def quality(self, metric: str) -> Quality:
        return self.result.further_qualities.get(metric, self.result.quality)

    def judged(self, metric: str, baseline: _Side | None = None) -> MetricScore | None:
        """These outputs, beside those of a baseline if there is one, from their stored values or
        else from their texts. None if neither values nor references are known.
        """
        sides = [self.examples] if baseline is None else [self.examples, baseline.examples]
        values = _stored_values(metric, sides)
        if values is not None:
            return judge_values(self.quality(metric).metric, *values, seed=SACREBLEU_SEED)
        token_metric = metric_named(metric).of_tokens
        if token_metric is not None:
            outputs = [
                [token_metric(len(example.token_ids), example.log_probability) for example in side]
                for side in sides
            ]
            references = [NO_REFERENCE] * len(self.examples)
            return judge(metric, *_with_baseline(outputs), references, seed=SACREBLEU_SEED)
        if self.references is None:
            return None
        # of older results, whose texts went on behind stop strings
        cut = self.result.setting.get("cut") or ()
        outputs = [[before_stop(example.prediction, cut) for example in side] for side in sides]
        return judge(
            metric,
            *_with_baseline(outputs),
            self.references,
            seed=SACREBLEU_SEED,
            writing=self.writing,
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


def _compare_metric(metric: str, a: _Side, b: _Side) -> MetricComparison:
    """A metric of both sides: the results' own values, or those of these examples alone if more
    were decoded.
    """
    against_a = b.judged(metric, a)
    return MetricComparison(
        metric=a.quality(metric).metric,
        values=(_metric_value(metric, a), _metric_value(metric, b)),
        difference=None if against_a is None else against_a.difference,
    )


def _metric_value(metric: str, side: _Side) -> float | None:
    if side.has_all:
        return side.quality(metric).value
    judged = side.judged(metric)
    return None if judged is None else judged.score.value


Seconds = Sequence[Sequence[float] | None]  # of each example's repeats


def _ratio(numerators: Sequence[Seconds], denominators: Sequence[Seconds]) -> Speedup | None:
    """A product of total seconds over another; the median of an example's repeats counts.

    None if an example was not timed.
    """
    if not all(repeats for seconds in (*numerators, *denominators) for repeats in seconds):
        return None
    return paired_ratio(
        [_medians(seconds) for seconds in numerators],
        [_medians(seconds) for seconds in denominators],
    )


def _medians(seconds: Seconds) -> np.ndarray:
    """The median of each example's repeats, of shape (examples, 1)."""
    return np.array([[float(np.median(repeats))] for repeats in seconds])


def _why_not_comparable(pair: MatchedPoint) -> str | None:
    """Why the latencies of A and B cannot be compared; None if they can."""
    if not (pair.a.timed and pair.b.timed):
        return "replayed texts were not timed"
    machine_a, machine_b = _machine(pair.a), _machine(pair.b)
    if machine_a != machine_b:
        return f"different hardware: {machine_a}, {machine_b}"
    shared = pair.a.environment.shared_device or pair.b.environment.shared_device
    return "timed beside other jobs on the same device" if shared else None


def _machine(result: Result) -> str:
    device, _, _ = result.setting.device.partition(":")
    return f"{device} {result.setting.hardware}"


def flat_setting(result: Result) -> dict[str, Any]:
    """A result's setting with its groups, such as decoding, merged into one flat mapping."""
    flat: dict[str, Any] = {}
    for key, value in result.setting.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def _require_same_task(pair: MatchedPoint) -> None:
    """Raise UserError unless both have the same metric, and the same dataset or, under two names,
    the same rows.
    """
    setting_a, setting_b = pair.a.setting, pair.b.setting
    keys = ["metric", "tokenize", "language"]
    if setting_a.data is None or setting_a.data != setting_b.data:
        keys = ["dataset", "split", *keys]
    for key in keys:
        if setting_a.get(key) != setting_b.get(key):
            raise UserError(
                f"A and B must have the same {key} to be compared, got {setting_a.get(key)} and"
                f" {setting_b.get(key)} at {_point_text(pair.a)}; measure one of them again with"
                " the dataset keys of the other"
            )


def _matched_knobs(policy: str, a: Sequence[Result], b: Sequence[Result]) -> set[str]:
    """The knobs of a policy that both A and B have or that vary within one."""
    knobs_a = [result.knobs for result in a if result.policy == policy]
    knobs_b = [result.knobs for result in b if result.policy == policy]
    names_a = {name for knobs in knobs_a for name in knobs}
    names_b = {name for knobs in knobs_b for name in knobs}
    if not knobs_a or not knobs_b:
        return names_a | names_b
    varying = {
        name for name in names_a ^ names_b if _varies(name, knobs_a) or _varies(name, knobs_b)
    }
    return (names_a & names_b) | varying


def _varying_keys(results: Sequence[Result]) -> dict[str, None]:
    """The keys of the setting that vary among these results, but for those that the user does not
    choose.
    """
    settings = [flat_setting(result) for result in results]
    keys = dict.fromkeys(key for setting in settings for key in setting if key not in DERIVED_KEYS)
    return {key: None for key in keys if _varies(key, settings)}


def _varies(key: str, mappings: Sequence[Mapping[str, Any]]) -> bool:
    return len({_comparable(mapping.get(key)) for mapping in mappings}) > 1


def _comparable(value: Any) -> str:
    """A text that equal values share."""
    return json.dumps(plain_numbers(value), sort_keys=True, default=str)


def _point_text(result: Result) -> str:
    return " ".join([result.policy, *(f"{knob}={value}" for knob, value in result.knobs.items())])


def _point_list(results: Collection[Result]) -> str:
    """The first points by name, and how many more there are."""
    texts = [_point_text(result) for result in results]
    listed = ", ".join(texts[:_LISTED_POINTS])
    more = len(texts) - _LISTED_POINTS
    return f"{listed} and {more} more" if more > 0 else listed
