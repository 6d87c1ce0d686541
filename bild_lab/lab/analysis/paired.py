"""Compare points of two sweeps, A and B: which side is faster, which is better, and what may be chance."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bild_lab.errors import UserError
from bild_lab.lab.analysis.statistics import paired_speedup
from bild_lab.lab.hashing import plain_numbers
from bild_lab.lab.metrics import AGREEMENT, Difference, Judged, cut_text, judge, judge_values
from bild_lab.lab.schema.measured_examples import MeasuredExample
from bild_lab.lab.schema.quality import Quality
from bild_lab.lab.schema.result import Result, Speedup

SIGNIFICANT = 0.05
SACREBLEU_SEED = 12345  # with it, intervals of BLEU are those of `sacrebleu --paired-bs`
NOT_COMPARED, SAME = "not compared", "no difference"
# keys of the setting that the user does not choose, so they never distinguish two points of a sweep
DERIVED_KEYS = ("data", "weights", "code", "hardware")
_TASK_KEYS = ("dataset", "split", "metric")


@dataclass(frozen=True)
class Pair:
    """One point in A and in B. distinct: setting values that, besides policy and knobs, distinguish it from others."""

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
    """One metric of A and B over the examples that both decoded. metric: as shown. difference: B minus A."""

    metric: str
    values: tuple[float | None, float | None]
    difference: Difference | None

    @property
    def verdict(self) -> str:
        """better or worse if chance gives a difference this large in fewer than 5 of 100 samples."""
        if self.difference is None:
            return NOT_COMPARED
        if self.difference.p_value >= SIGNIFICANT:
            return SAME
        return "better" if self.difference.value > 0 else "worse"


@dataclass(frozen=True)
class Compared:
    """A pair compared over the examples that both sides decoded.

    n_examples: how many these are; decoded: how many A and B have. speedups, qualities: of A and B over these examples,
    with a value of None if it is not known. latency: B's total latency divided by A's; below 1 if B is faster.
    baseline_latency: the same ratio for the baselines timed with them; it shows how much the machine itself changed.
    unfit: why latencies are not compared. quality: B minus A. further: the metrics behind the leading one.
    """

    pair: Pair
    n_examples: int
    decoded: tuple[int, int]
    speedups: tuple[Speedup, Speedup]
    qualities: tuple[float | None, float | None]
    latency: Speedup | None
    baseline_latency: Speedup | None
    unfit: str | None
    quality: Difference | None
    further: tuple[ComparedQuality, ...] = ()

    @property
    def speed_verdict(self) -> str:
        """faster or slower if the 95 % interval excludes 1."""
        if self.latency is None:
            return NOT_COMPARED
        return "faster" if self.latency.high < 1 else "slower" if self.latency.low > 1 else SAME

    @property
    def judged(self) -> tuple[ComparedQuality, ...]:
        """Every metric, the leading one first."""
        return (ComparedQuality(self.pair.a.quality.metric, self.qualities, self.quality), *self.further)

    @property
    def quality_verdict(self) -> str:
        """Of the leading metric."""
        return self.judged[0].verdict


def match(a: Sequence[Result], b: Sequence[Result]) -> Matching:
    """Pair the results of A and of B, each oldest first, by policy, knobs and other values that vary within A or B.

    Values that are constant within A and within B may differ between them, such as the precision or the code: they are
    what is compared. A knob that only one version of a policy has distinguishes points only if it varies. Of equal
    points the newest counts. Raises UserError if nothing matches, or if matching points have other datasets or metrics.
    """
    varying = [key for key in _setting_keys([*a, *b]) if _varies(a, key) or _varies(b, key)]
    knobs = {policy: _matched_knobs(policy, a, b) for policy in {result.policy for result in [*a, *b]}}
    first, second = ({_key(result, knobs, varying): result for result in results} for results in (a, b))
    shared = [key for key in first if key in second]
    if not shared:
        raise UserError(
            f"A and B have no point in common: A has {_listed(first.values())}; B has {_listed(second.values())}; "
            "points match by policy and knobs"
        )
    pairs = [
        Pair(first[key], second[key], {name: flat_setting(first[key]).get(name) for name in varying}) for key in shared
    ]
    for pair in pairs:
        _require_same_task(pair)
    return Matching(
        pairs,
        [result for key, result in first.items() if key not in second],
        [result for key, result in second.items() if key not in first],
    )


def differences(pairs: Iterable[Pair]) -> dict[str, tuple[str, str]]:
    """What else differs between A and B: each such key of the setting, or the commit, with the values of both.

    Which examples they have is left out: `Compared` counts them.
    """
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for pair in pairs:
        settings = [{**flat_setting(one), "commit": one.environment.git} for one in (pair.a, pair.b)]
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

    references: of each example, by its key; None if they are not known. Agreement with the baseline's outputs needs
    none. same: the keys that stand for the same text in both; None if all do. Raises UserError without a shared
    example.
    """
    first, second = ({one.key: one for one in examples} for examples in (examples_a, examples_b))
    keys = [key for key in first if key in second and (same is None or key in same)]
    if not keys:
        raise UserError(
            f"{_name(pair.a)}: A and B have no example in common, of {len(first)} and {len(second)}; "
            "measure one of them again with the dataset keys of the other"
        )
    a, b = ([examples[key] for key in keys] for examples in (first, second))
    known = None if references is None else [references[key] for key in keys]
    unfit, decoded = _why_not_comparable(pair), (len(first), len(second))
    lead, *further = _qualities(pair, (a, b), decoded, known)
    baselines = all(one.baseline_latency_s is not None for one in [*a, *b])
    return Compared(
        pair,
        len(keys),
        decoded,
        (_speedup(pair.a, a, len(first)), _speedup(pair.b, b, len(second))),
        lead.values,
        _ratio([one.latency_s for one in a], [one.latency_s for one in b]) if unfit is None else None,
        _ratio([one.baseline_latency_s for one in a], [one.baseline_latency_s for one in b])
        if unfit is None and baselines
        else None,
        unfit,
        lead.difference,
        tuple(further),
    )


def flat_setting(result: Result) -> dict[str, Any]:
    """A result's setting with its groups, such as decoding, merged into one flat mapping."""
    flat: dict[str, Any] = {}
    for key, value in result.setting.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def _speedup(result: Result, examples: Sequence[MeasuredExample], decoded: int) -> Speedup:
    """The result's own speedup, or that over these examples alone if it decoded more."""
    if len(examples) == decoded:
        return result.speedup
    if any(one.baseline_latency_s is None for one in examples):
        return Speedup()
    return _ratio([one.latency_s for one in examples], [one.baseline_latency_s for one in examples])


def _qualities(
    pair: Pair,
    examples: tuple[Sequence[MeasuredExample], Sequence[MeasuredExample]],
    decoded: tuple[int, int],
    references: Sequence[Sequence[str]] | None,
) -> list[ComparedQuality]:
    """Every metric that A and B both have, the leading one first, over these examples."""
    further = [name for name in pair.a.further_qualities if name in pair.b.further_qualities]
    found = []
    for metric in (pair.a.setting.metric, *further):
        sides = zip((pair.a, pair.b), examples, decoded, strict=True)
        values = tuple(_value(side, metric, several, count, references) for side, several, count in sides)
        judged = _judged(pair.b, metric, examples[1], examples[0], references)
        shown = _quality(pair.a, metric).metric
        found.append(ComparedQuality(shown, values, None if judged is None else judged.difference))
    return found


def _quality(result: Result, metric: str) -> Quality:
    return result.further_qualities.get(metric, result.quality)


def _value(
    result: Result,
    metric: str,
    examples: Sequence[MeasuredExample],
    decoded: int,
    references: Sequence[Sequence[str]] | None,
) -> float | None:
    """The result's own quality, or that of these examples alone if it decoded more."""
    if len(examples) == decoded:
        return _quality(result, metric).value
    judged = _judged(result, metric, examples, None, references)
    return None if judged is None else judged.score.value


def _judged(
    result: Result,
    metric: str,
    outputs: Sequence[MeasuredExample],
    baseline: Sequence[MeasuredExample] | None,
    references: Sequence[Sequence[str]] | None,
) -> Judged | None:
    """A result's outputs, beside others if there are any, from their stored values or else from their texts."""
    shown, cut = _quality(result, metric).metric, result.setting.get("cut") or ()
    sides = [outputs] if baseline is None else [outputs, baseline]
    if all(metric in (one.scores or {}) for side in sides for one in side):
        return judge_values(shown, *([one.scores[metric] for one in side] for side in sides), seed=SACREBLEU_SEED)
    if metric == AGREEMENT:  # each example equals its own baseline's output or not
        equal = ([100.0 * (one.prediction == one.baseline_prediction) for one in side] for side in sides)
        return judge_values(shown, *equal, seed=SACREBLEU_SEED)
    if references is None:
        return None
    texts = [[cut_text(one.prediction, cut) for one in side] for side in sides]
    return judge(metric, texts[0], texts[1] if len(texts) > 1 else None, references, seed=SACREBLEU_SEED)


def _ratio(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Speedup:
    """B's seconds divided by A's. Both are given by example and repeat; the median of an example's repeats counts."""
    medians = [np.array([[float(np.median(repeats))] for repeats in several]) for several in (a, b)]
    return paired_speedup(medians[1], medians[0])


def _why_not_comparable(pair: Pair) -> str | None:
    """Why the latencies of A and B cannot be compared; None if they can."""
    hardware = [_hardware(one) for one in (pair.a, pair.b)]
    if hardware[0] != hardware[1]:
        return f"different hardware: {hardware[0]}, {hardware[1]}"
    if any(one.environment.shared_device for one in (pair.a, pair.b)):
        return "timed beside other jobs on the same device"
    return None


def _hardware(result: Result) -> str:
    setting, environment = result.setting, result.environment
    return f"{setting.device.partition(':')[0]} {setting.hardware or environment.gpu or environment.cpu}"


def _require_same_task(pair: Pair) -> None:
    for key in _TASK_KEYS:
        a, b = (one.setting.get(key) for one in (pair.a, pair.b))
        if a != b:
            raise UserError(
                f"A and B must have the same {key} to be compared, got {a} and {b} at {_name(pair.a)}; "
                "measure one of them again with the dataset keys of the other"
            )


def _matched_knobs(policy: str, a: Sequence[Result], b: Sequence[Result]) -> set[str]:
    """The knobs of a policy that both A and B have or that vary within one."""
    both = [[result.knobs for result in results if result.policy == policy] for results in (a, b)]
    names = [{name for knobs in several for name in knobs} for several in both]
    if not all(both):
        return names[0] | names[1]
    unshared = names[0] ^ names[1]
    varying = {name for several in both for name in unshared if len({_text(k.get(name)) for k in several}) > 1}
    return (names[0] & names[1]) | varying


def _key(result: Result, knobs: Mapping[str, set[str]], varying: Sequence[str]) -> str:
    matched = {name: value for name, value in result.knobs.items() if name in knobs[result.policy]}
    setting = flat_setting(result)
    return _text([result.policy, matched, {key: setting.get(key) for key in varying}])


def _setting_keys(results: Sequence[Result]) -> list[str]:
    return [
        key for key in dict.fromkeys(key for one in results for key in flat_setting(one)) if key not in DERIVED_KEYS
    ]


def _varies(results: Sequence[Result], key: str) -> bool:
    return len({_text(flat_setting(result).get(key)) for result in results}) > 1


def _text(value: Any) -> str:
    return json.dumps(plain_numbers(value), sort_keys=True, default=str)


def _name(result: Result) -> str:
    return " ".join([result.policy, *(f"{knob}={value}" for knob, value in result.knobs.items())])


def _listed(results: Iterable[Result], most: int = 4) -> str:
    names = [_name(result) for result in results]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
