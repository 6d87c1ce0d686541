"""Results grouped by their setting: only results with the same setting are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bild_lab.lab.config.policies import changed_knobs, flat_values
from bild_lab.lab.config.schemas import PairSpec
from bild_lab.lab.schema.columns import to_json
from bild_lab.lab.schema.formatting import counted, is_command, knob_label, point_label, short_name
from bild_lab.lab.schema.numbers import MetricScale, scale_of
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.lab.schema.statistics import best_at_loss, can_be_judged, pareto_front
from bild_lab.lab.store.hashing import canonical_text

FEW = 12  # so many results are all selected
WIDE = 8.0  # the largest ratio of latencies on a linear axis
SLOW = 2.0  # from this ratio to the baseline's latency on a point would squeeze the others
LOW = 0.5  # below this share of the baseline's quality it would, too
HASH_KEYS = ("code", "data", "weights")  # keys of the setting whose values mean nothing to a reader


@dataclass(frozen=True)
class Position:
    """The position of a result in the figure: x is cost, y is quality, both with intervals."""

    x: float
    x_low: float
    x_high: float
    y: float
    y_low: float
    y_high: float


@dataclass(frozen=True)
class Group:
    """All results that share one setting, fastest first, those that were not timed last.

    in_seconds: draw latencies in seconds, beside any baseline. The results stay as they are: what is
    asked for beside each of them, such as the front, is found once.
    """

    setting: Setting
    results: list[Result]
    in_seconds: bool = False

    @property
    def metric(self) -> str:
        """The quality metric's name."""
        return self.results[0].quality.metric

    @property
    def scale(self) -> MetricScale:
        """How the metric's values are written."""
        return scale_of(self.metric)

    @cached_property
    def relative(self) -> bool:
        """Whether latency can be given relative to a baseline."""
        return not self.in_seconds and any(
            result.speedup.value is not None for result in self.results
        )

    @property
    def judged(self) -> list[Result]:
        """The timed results that may be called better or faster (`can_be_judged`), fastest first."""
        return [result for result in self.results if result.timed and can_be_judged(result)]

    @cached_property
    def baseline_quality(self) -> float | None:
        """The quality of the baseline, from its own result or from those compared with it."""
        own_quality = [result.quality.value for result in self.results if result.is_baseline]
        paired_quality = [result.quality.baseline for result in self.results]
        for value in [*own_quality, *paired_quality]:
            if value is not None and math.isfinite(value):
                return value
        return None

    @property
    def policies(self) -> list[str]:
        """The policies other than the baseline, in alphabetical order."""
        return sorted({result.policy for result in self.results if not result.is_baseline})

    def of_policy(self, policy: str) -> list[Result]:
        """The policy's results, fastest first, without the baseline: that may be the same policy
        with other knobs.
        """
        return [
            result for result in self.results if result.policy == policy and not result.is_baseline
        ]

    def position(self, result: Result) -> Position | None:
        """Return where a result is drawn; None if it was not timed, or if its quality is not known.

        With a baseline, x is the latency relative to it, that is, one over the speedup, and the
        vertical interval is that of the paired difference from it. Without, x is the mean latency
        in seconds and the vertical interval is that of the quality itself.
        """
        x = self._latency(result)
        y = result.quality.value
        if x is None or y is None or not math.isfinite(y):
            return None
        return Position(*x, y, *_vertical_interval(result))

    def limits(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return ranges of x and y that show every result, the baseline and the line a small loss
        below it.

        For intervals that leave a range, it is widened by at most half of its length on either
        side.
        """
        selected = set(map(id, self.selected()))  # those drawn with their intervals
        barred = [
            position
            for result, position in self.placed
            if id(result) in selected and not result.is_baseline
        ]
        return self._horizontal_limits(barred), self._vertical_limits(barred)

    def _horizontal_limits(self, barred: Sequence[Position]) -> tuple[float, float]:
        """The range of x. barred: the positions whose intervals are drawn."""
        xs = [position.x for _, position in self.placed]
        if self.relative:
            xs.append(1.0)
        left, right = min(xs), max(xs)
        if self.needs_log_axis:
            room = (right / left) ** 0.06
            return left / room, right * room
        room = max(0.09 * (right - left), 0.03 * right)
        ends = [end for position in barred for end in (position.x_low, position.x_high)]
        low, high = _widened(left - room, right + room, ends)
        return max(low, 0.1 * left), high  # a latency is positive

    def _vertical_limits(self, barred: Sequence[Position]) -> tuple[float, float]:
        """The range of y. barred: the positions whose intervals are drawn."""
        ys, loss = [position.y for _, position in self.placed], self.scale.small_loss
        if self.relative and self.baseline_quality is not None:
            ys += [self.baseline_quality + 0.4 * loss, self.baseline_quality - loss]
        bottom, top = min(ys), max(ys)
        room = max(0.11 * (top - bottom), 0.15 * loss)
        ends = [end for position in barred for end in (position.y_low, position.y_high)]
        return _widened(bottom - room, top + room, ends)

    @cached_property
    def placed(self) -> list[tuple[Result, Position]]:
        """The results that are drawn, with their positions: all that have one but those beyond the
        axis.
        """
        positions = [
            (result, self.position(result))
            for result in self.results
            if not self.is_off_axis(result)
        ]
        return [(result, position) for result, position in positions if position is not None]

    @cached_property
    def off_axis(self) -> list[Result]:
        """The results named beside the axes, fastest first: slow ones, and ones of low quality.

        None where no other result would be left.
        """
        drawable = [
            result
            for result in self.results
            if not result.is_baseline and self.position(result) is not None
        ]
        outside = [result for result in drawable if self.is_slow(result) or self.is_low(result)]
        return outside if len(outside) < len(drawable) else []

    def is_slow(self, result: Result) -> bool:
        """Whether it takes more than `SLOW` times the baseline's latency, and is not better beyond
        chance.
        """
        quality, speedup = result.quality, result.speedup.value
        if not self.relative or speedup is None or not SLOW * speedup < 1:
            return False
        return not (quality.beyond_chance and quality.difference > 0)

    def is_low(self, result: Result) -> bool:
        """Whether it has less than `LOW` times the baseline's quality. Of a quality below 0, such as
        a log-probability, no share is taken.
        """
        baseline = self.baseline_quality
        if not self.relative or baseline is None or baseline <= 0:
            return False
        return result.quality.value < LOW * baseline

    @property
    def needs_log_axis(self) -> bool:
        """Whether the latencies, also a baseline's of 1, differ so much that their axis must be
        logarithmic.
        """
        xs = [position.x for _, position in self.placed] + ([1.0] if self.relative else [])
        return bool(xs) and max(xs) / min(xs) > WIDE

    @cached_property
    def front(self) -> list[Result]:
        """The undominated results, cheapest first; the baseline competes, an impossible speedup and
        texts without a word do not.
        """
        possible = [result for result in self.results if result.may_be_best]
        drawn = [
            (result, position)
            for result in possible
            if (position := self.position(result)) is not None
        ]
        coordinates = [(position.x, position.y) for _, position in drawn]
        if self.relative and self.baseline_quality is not None:
            # even if its own result is not among these
            coordinates.append((1.0, self.baseline_quality))
        front = pareto_front(coordinates)
        return [
            drawn[index][0]
            for index in front
            if index < len(drawn) and not drawn[index][0].is_baseline
        ]

    def is_on_front(self, result: Result) -> bool:
        """Whether this very result is on the front, not one that is equal."""
        return id(result) in self._front_ids

    def is_off_axis(self, result: Result) -> bool:
        """Whether this very result is named beside the axes, not one that is equal."""
        return id(result) in self._off_axis_ids

    @cached_property
    def _front_ids(self) -> frozenset[int]:
        return frozenset(map(id, self.front))

    @cached_property
    def _off_axis_ids(self) -> frozenset[int]:
        return frozenset(map(id, self.off_axis))

    def notable(self) -> list[Result]:
        """Return each policy's fastest result (also the baseline's), and the best at no and at a
        small loss.
        """
        fastest: dict[tuple[str, bool], Result] = {}
        for result in self.results:
            fastest.setdefault((result.policy, result.is_baseline), result)
        best_points = [best_at_loss(self.results, loss) for loss in (0.0, self.scale.small_loss)]
        return self._in_order([*fastest.values(), *best_points])

    def selected(self, limit: int = FEW) -> list[Result]:
        """Return the notable results and the whole front; all results if there are at most so
        few.
        """
        if len(self.results) <= limit:
            return self.results
        return self._in_order([*self.notable(), *self.front])

    @cached_property
    def knobs(self) -> Callable[[Result], list[str]]:
        """From a result to the knobs that its label names: the `telling_knobs` of all results."""
        return telling_knobs(self.results)

    def knob_label(self, result: Result, separator: str = ", ") -> str:
        """Return these knobs with their values: `fallback 0.5, rollback 1`."""
        return knob_label(result, self.knobs(result), separator, self.results)

    def label(self, result: Result) -> str:
        """Return its policy with these knobs: `bild (fallback 0.5)`."""
        return point_label(result, self.knobs(result), self.results)

    def varying_knobs(self) -> list[str]:
        """Return every knob that takes more than one value within some policy, in order of
        appearance.
        """
        knobs_by_policy = _varying_knobs_of_policies(self.results).values()
        return list(dict.fromkeys(knob for knobs in knobs_by_policy for knob in knobs))

    def _in_order(self, results: list[Result | None]) -> list[Result]:
        selected = set(map(id, results))
        return [result for result in self.results if id(result) in selected]

    def _latency(self, result: Result) -> tuple[float, float, float] | None:
        speedup = result.speedup
        if not result.timed:
            return None
        if not self.relative:
            mean = result.latency_s.mean
            return (mean, mean, mean)
        if result.is_baseline:
            return (1.0, 1.0, 1.0)
        if speedup.value is None:
            return None
        bounds = [
            speedup.value if value is None else value for value in (speedup.high, speedup.low)
        ]
        return (1 / speedup.value, 1 / bounds[0], 1 / bounds[1])


def by_setting(results: Sequence[Result]) -> list[Group]:
    """Group results by their setting and metric, in order of appearance, each group fastest
    first.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        key = _comparable_key(result.setting, result.quality.metric)
        groups.setdefault(key, []).append(result)
    return [Group(group[0].setting, sorted(group, key=_slowness)) for group in groups.values()]


def by_setting_without_seed(groups: Sequence[Group]) -> list[list[Group]]:
    """Gather groups whose settings differ in nothing but the seed, in order of appearance."""
    gathered: dict[str, list[Group]] = {}
    for group in groups:
        key = _comparable_key(group.setting, group.metric, without="seed")
        gathered.setdefault(key, []).append(group)
    return list(gathered.values())


def _comparable_key(
    setting: Setting, metric: str, *further: Any, without: str | None = None
) -> str:
    """A text that equal settings with this metric share. further: what else must be equal. without:
    a key of the setting that may differ.
    """
    compared = to_json(setting)
    compared.pop(without, None)
    return canonical_text([compared, metric, *further])


def flat_setting(result: Result) -> dict[str, Any]:
    """A result's setting with its groups, such as decoding, merged into one flat mapping."""
    flat: dict[str, Any] = {}
    for key, value in result.setting.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return {**flat, "batch": result.setting.get("batch")}  # which only batches store


def varying_keys(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all mappings, in order of appearance. A missing key
    counts as None.
    """
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return [
        key for key in keys if len({canonical_text(mapping.get(key)) for mapping in mappings}) > 1
    ]


def differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return the keys of the setting whose values are not the same in all groups, of a key with
    values inside the dotted ones: `decoding.temperature`.
    """
    keys = dict.fromkeys(key for group in groups for key in flat_values(dict(group.setting)))
    return varying_keys(
        [{key: setting_value(group.setting, key) for key in keys} for group in groups]
    )


def setting_value(setting: Setting, key: str) -> Any:
    """The value of a key, as `differing_keys` names it."""
    return flat_values(dict(setting)).get(key, setting.get(key))


def setting_title(setting: Setting) -> str:
    """Return a title of the setting: `t5-large drafted by t5-tiny, multi30k test, 100 examples`."""
    return f"{pair_title(setting)}, {data_title(setting)}"


def pair_title(setting: Setting | PairSpec) -> str:
    """Return the models of the setting, or of a pair: `t5-large drafted by t5-tiny`."""
    return short_name(setting.target) + (
        f" drafted by {short_name(setting.draft)}" if setting.draft else ""
    )


def data_title(setting: Setting) -> str:
    """Return the data of the setting: `multi30k test, 100 examples`."""
    return (
        f"{short_name(setting.dataset)} {setting.split}, {counted(setting.n_examples, 'example')}"
    )


def varying_knobs(results: Sequence[Result]) -> list[str]:
    """Return the knobs that do not have the same value in all of these results."""
    return varying_keys([result.knobs for result in results])


def telling_knobs(points: Sequence[Any]) -> Callable[[Any], list[str]]:
    """Return a function from any of these points to the knobs that tell it from the others of its
    policy, or a single one from its policy's file, of which commands are left out: their first
    words say little.

    points: anything with a policy and its knobs, such as results or failures. All are looked at
    once.
    """
    varying = _varying_knobs_of_policies(points)

    def telling(point: Any) -> list[str]:
        if point.policy in varying:
            return [knob for knob in varying[point.policy] if knob in point.knobs]
        changed = changed_knobs(point.policy, point.knobs)
        return [knob for knob in changed if not is_command(point.knobs[knob])]

    return telling


def _varying_knobs_of_policies(points: Sequence[Any]) -> dict[str, list[str]]:
    """The `varying_knobs` of each policy with several points, in order of appearance."""
    points_of_policy: dict[str, list[Any]] = {}
    for point in points:
        points_of_policy.setdefault(point.policy, []).append(point)
    return {
        policy: varying_knobs(peers) for policy, peers in points_of_policy.items() if len(peers) > 1
    }


def _slowness(result: Result) -> tuple[float, float]:
    if not result.timed:
        return (math.inf, math.inf)
    speedup = 1.0 if result.is_baseline else result.speedup.value
    return (-speedup if speedup is not None else 0.0, result.latency_s.mean)


def _widened(low: float, high: float, ends: Sequence[float]) -> tuple[float, float]:
    """The range low to high, widened for ends outside of it by at most half of its length on either
    side.
    """
    max_widening, room = (high - low) / 2, 0.02 * (high - low)
    below = low - min([low, *ends])
    if below > 0:
        below += room
    above = max([high, *ends]) - high
    if above > 0:
        above += room
    return low - min(max_widening, below), high + min(max_widening, above)


def _vertical_interval(result: Result) -> tuple[float, float]:
    quality = result.quality
    if quality.difference_low is not None and quality.baseline is not None:
        return (
            quality.baseline + quality.difference_low,
            quality.baseline + quality.difference_high,
        )
    if quality.low is not None:
        return (quality.low, quality.high)
    return (quality.value, quality.value)


def differing_in(key: str, results: Sequence[Result]) -> list[dict[Any, Result]]:
    """Points, without baselines, that differ in nothing but this key of their setting, each by its
    value.
    """
    groups: dict[str, dict[Any, Result]] = {}
    for result in results:
        if result.is_baseline or not result.timed:
            continue
        point_key = _comparable_key(
            result.setting, result.quality.metric, result.policy, dict(result.knobs), without=key
        )
        group = groups.setdefault(point_key, {})
        group[result.setting.get(key)] = result
    return list(groups.values())


def points_of_choice(results: Sequence[Result]) -> list[list[Result]]:
    """What the best of these results is chosen among: every timed point without the baseline, whether
    it could be the best or not. Results that differ in nothing but the seed are one point.
    """
    return [list(by_seed.values()) for by_seed in differing_in("seed", results)]
