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
    score_values,
    score_with_baseline,
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
OF_THE_METHOD = {
    *("commit", "target", "draft", "second_draft", "draft_weight_bits", "compile_drafter"),
    *("dataset", "split", "repeats", "warmup"),
}


@dataclass(frozen=True)
class Pair:
    """One point in A and in B. distinct: setting values that, besides policy and knobs, distinguish
    it from others.
    """

    a: Result
    b: Result
    distinct: dict[str, Any]


@dataclass(frozen=True)
class Matching:
    """The points that both A and B have, and those that only one of them has."""

    pairs: list[Pair]
    only_a: list[Result]
    only_b: list[Result]


@dataclass(frozen=True)
class ComparedQuality:
    """One metric of A and B over the examples that both decoded. metric: as shown. difference:

    B minus A.
    """

    metric: str
    values: tuple[float | None, float | None]
    difference: Difference | None

    @property
    def verdict(self) -> str:
        """better or worse if chance gives a difference this large in fewer than 5 of 100
        samples.
        """
        if self.difference is None:
            return NOT_COMPARED
        if self.difference.p_value >= SIGNIFICANT:
            return SAME
        return "better" if self.difference.value > 0 else "worse"


@dataclass(frozen=True)
class Compared:
    """A pair compared over the examples that both sides decoded.

    n_examples: how many these are; decoded: how many A and B have. speedups: of A and B over these
    examples. latency: B's total latency divided by A's; below 1 if B is faster. baseline_latency:
    the same ratio for the baselines timed with them. unfit: why latencies are not compared. judged:
    every metric, the leading one first. relative: the first ratio over the second, in which a
    machine that has become slower does not count; with a baseline of the same code and setting it
    is also `latency`.
    """

    pair: Pair
    n_examples: int
    decoded: tuple[int, int]
    speedups: tuple[Speedup, Speedup]
    latency: Speedup | None
    baseline_latency: Speedup | None
    unfit: str | None
    judged: tuple[ComparedQuality, ...]
    relative: Speedup | None = None

    @property
    def speed_verdict(self) -> str:
        """faster or slower if the 95 % interval excludes 1, unless the speedups clearly say the
        opposite.
        """
        if self.latency is None:
            return NOT_COMPARED
        found = [
            "faster" if one.high < 1 else "slower" if one.low > 1 else SAME
            for one in (self.latency, self.relative or self.latency)
        ]
        return UNCLEAR if SAME not in found and found[0] != found[1] else found[0]

    @property
    def quality(self) -> ComparedQuality:
        """The leading metric."""
        return self.judged[0]


def match(a: Sequence[Result], b: Sequence[Result]) -> Matching:
    """Pair the results of A and of B, each oldest first, by policy, knobs and other values that
    vary within A or B.

    Values that are constant within A and within B may differ between them, such as the precision or
    the code: they are what is compared. A knob that only one version of a policy has distinguishes
    points only if it varies. Of equal points the newest counts. Raises UserError if nothing
    matches, or if matching points have other datasets or metrics.
    """
    varying = list(_varying(a) | _varying(b))
    knobs = {
        policy: _matched_knobs(policy, a, b) for policy in {result.policy for result in [*a, *b]}
    }

    def key_of(result: Result) -> str:
        matched = {
            name: value for name, value in result.knobs.items() if name in knobs[result.policy]
        }
        setting = flat_setting(result)
        return _text([result.policy, matched, {key: setting.get(key) for key in varying}])

    first, second = ({key_of(result): result for result in results} for results in (a, b))
    shared = [key for key in first if key in second]
    if not shared:
        raise UserError(
            f"A and B have no point in common: A has {_listed(first.values())}; B has"
            f" {_listed(second.values())}; points match by policy and knobs"
        )
    pairs = [
        Pair(
            first[key], second[key], {name: flat_setting(first[key]).get(name) for name in varying}
        )
        for key in shared
    ]
    for pair in pairs:
        _require_same_task(pair)
    alone = (
        [result for key, result in own.items() if key not in shared] for own in (first, second)
    )
    return Matching(pairs, *alone)


def differences(pairs: Iterable[Pair]) -> dict[str, tuple[str, str]]:
    """What else differs between A and B: each such key of the setting, or the commit, with the
    values of both.

    Which examples they have is left out: `Compared` counts them.
    """
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for pair in pairs:
        settings = [
            {**flat_setting(one), "commit": one.environment.git} for one in (pair.a, pair.b)
        ]
        for key in dict.fromkeys([*settings[0], *settings[1]]):
            values = [plain_numbers(setting.get(key)) for setting in settings]
            if key not in (*pair.distinct, "data", "n_examples") and values[0] != values[1]:
                for several, value in zip(found.setdefault(key, ({}, {})), values, strict=True):
                    several[str(value)] = None
    return {key: (", ".join(a), ", ".join(b)) for key, (a, b) in found.items()}


def compare_pair(
    pair: Pair,
    examples_a: Sequence[MeasuredExample],
    examples_b: Sequence[MeasuredExample],
    references: Mapping[tuple[str, int], Sequence[str]] | None,
    same: Collection[tuple[str, int]] | None = None,
) -> Compared:
    """Compare a pair over the examples that A and B both have, paired by their keys.

    references: of each example, by its key; None if they are not known. Agreement with the
    baseline's outputs needs none. same: the keys that mean the same text in both; None if all do.
    Raises UserError without a shared example.
    """
    first, second = ({one.key: one for one in examples} for examples in (examples_a, examples_b))
    keys = [key for key in first if key in second and (same is None or key in same)]
    if not keys:
        raise UserError(
            f"{_name(pair.a)}: A and B have no example in common, of {len(first)} and"
            f" {len(second)}; measure one of them again with the dataset keys of the other"
        )
    known = None if references is None else [references[key] for key in keys]
    a, b = (
        _Side(result, [examples[key] for key in keys], len(keys) == len(examples), known)
        for result, examples in ((pair.a, first), (pair.b, second))
    )
    further = [name for name in pair.a.further_qualities if name in pair.b.further_qualities]
    judged = tuple(_compared(metric, a, b) for metric in (pair.a.setting.metric, *further))
    unfit = _why_not_comparable(pair)
    latency = baseline = relative = None
    if not unfit:
        baseline = _ratio([b.baseline_s], [a.baseline_s])
        relative = _ratio([b.latency_s, a.baseline_s], [a.latency_s, b.baseline_s])
        alike = relative is not None and set(differences([pair])) <= OF_THE_METHOD
        latency = relative if alike else _ratio([b.latency_s], [a.latency_s])
    speedups = (a.speedup, b.speedup)
    decoded = (len(first), len(second))
    return Compared(pair, len(keys), decoded, speedups, latency, baseline, unfit, judged, relative)


@dataclass(frozen=True)
class _Side:
    """A result with the examples that the other side has too. whole: whether these are all that it
    decoded.
    """

    result: Result
    examples: Sequence[MeasuredExample]
    whole: bool
    references: Sequence[Sequence[str]] | None

    @property
    def latency_s(self) -> list[Sequence[float]]:
        return [one.latency_s for one in self.examples]

    @property
    def baseline_s(self) -> list[Sequence[float] | None]:
        return [one.baseline_latency_s for one in self.examples]

    @property
    def speedup(self) -> Speedup:
        """The result's own, or that over these examples alone if it decoded more."""
        return (
            self.result.speedup
            if self.whole
            else _ratio([self.baseline_s], [self.latency_s]) or Speedup()
        )

    @property
    def writing(self) -> Writing:
        """How the references are written, as the point was told."""
        setting = self.result.setting
        return Writing(
            setting.get("tokenize"), setting.get("language") or setting.get("target_language")
        )

    def quality(self, metric: str) -> Quality:
        return self.result.further_qualities.get(metric, self.result.quality)

    def judged(self, metric: str, baseline: _Side | None = None) -> MetricScore | None:
        """These outputs, beside others if there are any, from their stored values or else from
        their texts.
        """
        shown = self.quality(metric).metric
        # of older results, whose texts went on behind stop strings
        cut = self.result.setting.get("cut") or ()
        sides = [one.examples for one in (self, baseline) if one is not None]
        if all(metric in (one.scores or {}) for side in sides for one in side):
            return score_values(
                shown,
                *([one.scores[metric] for one in side] for side in sides),
                seed=SACREBLEU_SEED,
            )
        if metric == AGREEMENT:  # each example equals its own baseline's output or not
            equal = (
                [100.0 * (one.prediction == one.baseline_prediction) for one in side]
                for side in sides
            )
            return score_values(shown, *equal, seed=SACREBLEU_SEED)
        if (counted := metric_named(metric).of_tokens) is not None:
            sums = [
                [counted(len(one.token_ids), one.log_probability) for one in side] for side in sides
            ]
            theirs = sums[1] if baseline else None
            return score_with_baseline(
                metric, sums[0], theirs, [NO_REFERENCE] * len(sums[0]), seed=SACREBLEU_SEED
            )
        if self.references is None:
            return None
        texts, theirs = [[before_stop(one.prediction, cut) for one in side] for side in sides], None
        if baseline is not None:
            theirs = texts[1]
        return score_with_baseline(
            metric, texts[0], theirs, self.references, seed=SACREBLEU_SEED, writing=self.writing
        )


def _compared(metric: str, a: _Side, b: _Side) -> ComparedQuality:
    """A metric of both sides: the results' own values, or those of these examples alone if more
    were decoded.
    """
    values = [side.quality(metric).value for side in (a, b)]
    for place, side in enumerate((a, b)):
        if not side.whole:
            values[place] = None if (judged := side.judged(metric)) is None else judged.score.value
    difference = None if (judged := b.judged(metric, a)) is None else judged.difference
    return ComparedQuality(a.quality(metric).metric, tuple(values), difference)


Seconds = Sequence[Sequence[float] | None]  # of each example's repeats


def _ratio(above: Sequence[Seconds], below: Sequence[Seconds]) -> Speedup | None:
    """A product of total seconds over another; the median of an example's repeats counts.

    None if one was not timed.
    """
    if not all(repeats for seconds in (*above, *below) for repeats in seconds):
        return None
    medians = [
        [np.array([[float(np.median(repeats))] for repeats in seconds]) for seconds in several]
        for several in (above, below)
    ]
    return paired_ratio(*medians)


def _why_not_comparable(pair: Pair) -> str | None:
    """Why the latencies of A and B cannot be compared; None if they can."""
    if not (pair.a.timed and pair.b.timed):
        return "replayed texts were not timed"
    a, b = (
        f"{one.setting.device.partition(':')[0]} {one.setting.hardware}" for one in (pair.a, pair.b)
    )
    if a != b:
        return f"different hardware: {a}, {b}"
    shared = pair.a.environment.shared_device or pair.b.environment.shared_device
    return "timed beside other jobs on the same device" if shared else None


def flat_setting(result: Result) -> dict[str, Any]:
    """A result's setting with its groups, such as decoding, merged into one flat mapping."""
    flat: dict[str, Any] = {}
    for key, value in result.setting.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def _require_same_task(pair: Pair) -> None:
    """Raise UserError unless both have the same metric, and the same dataset or, under two names,
    the same rows.
    """
    alike = pair.a.setting.data is not None and pair.a.setting.data == pair.b.setting.data
    scored = ("metric", "tokenize", "language")
    for key in scored if alike else ("dataset", "split", *scored):
        a, b = (one.setting.get(key) for one in (pair.a, pair.b))
        if a != b:
            raise UserError(
                f"A and B must have the same {key} to be compared, got {a} and {b} at"
                f" {_name(pair.a)}; measure one of them again with the dataset keys of the other"
            )


def _matched_knobs(policy: str, a: Sequence[Result], b: Sequence[Result]) -> set[str]:
    """The knobs of a policy that both A and B have or that vary within one."""
    both = [[result.knobs for result in results if result.policy == policy] for results in (a, b)]
    names = [{name for knobs in several for name in knobs} for several in both]
    if not all(both):
        return names[0] | names[1]
    unshared = names[0] ^ names[1]
    varying = {
        name
        for several in both
        for name in unshared
        if len({_text(k.get(name)) for k in several}) > 1
    }
    return (names[0] & names[1]) | varying


def _varying(results: Sequence[Result]) -> dict[str, None]:
    """The keys of the setting that vary among these results, but for those that the user does not
    choose.
    """
    settings = [flat_setting(one) for one in results]
    keys = dict.fromkeys(key for setting in settings for key in setting if key not in DERIVED_KEYS)
    return {key: None for key in keys if len({_text(setting.get(key)) for setting in settings}) > 1}


def _text(value: Any) -> str:
    return json.dumps(plain_numbers(value), sort_keys=True, default=str)


def _name(result: Result) -> str:
    return " ".join([result.policy, *(f"{knob}={value}" for knob, value in result.knobs.items())])


def _listed(results: Iterable[Result], most: int = 4) -> str:
    names = [_name(result) for result in results]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
