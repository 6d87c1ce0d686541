"""The tables of the HTML report, as plain values for its template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

from bild_lab.lab.analysis.pareto import hypervolume
from bild_lab.lab.formatting import (
    MISSING,
    duration,
    interval,
    knob_label,
    knob_value,
    number,
    percent,
    point_label,
    signed,
    signed_interval,
    times,
)
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.columns import Column
from bild_lab.lab.schema.numbers import Category, Counts, Latency, Quality, Speedup
from bild_lab.lab.schema.result import CERTIFICATE, COLUMNS, Result
from bild_lab.report.provenance import disturbance

MARGIN = 1.0  # points of quality that a hypervolume's reference point is below the baseline
# the columns after those with an interval; each shows its value alone, except the latency
_NUMBERS = (
    "latency_s_median",
    "tokens_per_s",
    "tokens_per_target_call",
    "acceptance_rate",
    "nothing_accepted",
    "agreement_with_target",
    "p_value",
    "fallbacks",
    "rollbacks",
    "drafted",
    "accepted",
    "target_calls",
    "draft_calls",
    "tokens",
    "peak_memory_mb",
)


@dataclass(frozen=True)
class TableCell:
    """One table cell: its text, a smaller second line, and what to sort it by."""

    text: str
    detail: str = ""
    order: float | str | None = None


@dataclass(frozen=True)
class TableRow:
    """One point: the name of its folder, its cells, and whether to highlight it.

    point: empty for a baseline that is no point of its own. label: policy and all knobs. composition: its parts.
    """

    point: str
    cells: list[TableCell]
    on_front: bool = False
    is_baseline: bool = False
    label: str = ""
    composition: str = ""


@dataclass(frozen=True)
class FrontPoint:
    """A point of the Pareto front in the list beside the figure."""

    point: str
    label: str
    numbers: str


@dataclass(frozen=True)
class TableColumn:
    """One column of a table: its title, what the title means, how a cell is made."""

    title: str
    hint: str
    cell: Callable[[Any], TableCell]


@dataclass(frozen=True)
class BestRow:
    """The fastest point within an allowed loss; None if every point loses more. title: the allowed loss."""

    title: str
    best: Result | None
    knobs: list[tuple[str, str]]
    cells: list[TableCell]


@dataclass(frozen=True)
class PolicyVolume:
    """How much of the plane of latency and quality the points of a policy dominate."""

    policy: str
    points: int
    hypervolume: float

    @property
    def text(self) -> str:
        return number(self.hypervolume, 3)


@dataclass(frozen=True)
class Share:
    """One part of the sweep's time."""

    name: str
    text: str
    share: float
    percent: str


def column_of(column: Column, cell: Callable[[Result], TableCell] | None = None) -> TableColumn:
    """The column of a number of the result. cell: makes its cells, if the text alone is not enough."""
    return TableColumn(
        column.title,
        column.explanation,
        cell or (lambda result: TableCell(column.text(result), "", column.of(result))),
    )


def point_columns(group: Group) -> list[TableColumn]:
    """Return the columns for a setting: policy, every knob that varies, then the numbers."""
    own_cells = {"latency_s_median": _latency}
    quality = TableColumn(group.metric, COLUMNS["quality"].explanation, _quality)
    certified = any(result.certificate is not None for result in group.results)
    return [
        column_of(COLUMNS["policy"]),
        *(TableColumn(knob, f"knob of the policy: {knob}", _knob_cell(knob)) for knob in group.varying_knobs()),
        column_of(COLUMNS["speedup"], speedup_cell),
        quality,
        column_of(COLUMNS["quality_difference"], difference_cell),
        *further_columns(group),
        *([certificate_column()] if certified else []),
        *(column_of(COLUMNS[name], own_cells.get(name)) for name in _NUMBERS),
    ]


def further_columns(group: Group) -> list[TableColumn]:
    """Return a column for each metric behind the leading one: its value, and the difference from the baseline's."""
    shown = {name: one.metric for result in group.results for name, one in result.further_qualities.items()}

    def cell_of(name: str) -> Callable[[Result], TableCell]:
        def cell(result: Result) -> TableCell:
            quality = result.further_qualities.get(name)
            return TableCell(MISSING) if quality is None else further_cell(quality)

        return cell

    hint = "The metric of the point’s outputs; below it the difference from the baseline with its paired 95 % interval."
    return [TableColumn(title, hint, cell_of(name)) for name, title in shown.items()]


def further_cell(quality: Quality) -> TableCell:
    """A metric's value, with its difference below."""
    bounds = signed_interval(quality.difference_low, quality.difference_high)
    told = "" if quality.difference is None else f"{signed(quality.difference)} {bounds}"
    return TableCell(number(quality.value), told, quality.value)


def certificate_column() -> TableColumn:
    """Return the column of lossless certificates."""

    def cell(result: Result) -> TableCell:
        found = result.certificate
        if found is None:
            return TableCell(MISSING)
        if found.unjudged:
            return TableCell("no closed form", f"{found.defects} defects", found.defects)
        if found.rounding is not None:  # sampled
            return TableCell(f"{found.equal} exact", f"{found.ties} rounding, {found.defects} defects", found.defects)
        return TableCell(f"{found.equal} equal", f"{found.ties} ties, {found.defects} defects", found.defects)

    return TableColumn("certificate", " ".join(column.explanation for column in CERTIFICATE), cell)


def policy_column(group: Group) -> TableColumn:
    """Return the column that names a point by its policy and the knobs that distinguish it."""

    def cell(result: Result) -> TableCell:
        knobs = "baseline" if result.is_baseline else knob_label(result, group.knobs(result))
        return TableCell(result.policy, knobs, result.policy)

    return column_of(COLUMNS["policy"], cell)


def point_rows(group: Group, columns: Sequence[TableColumn], results: Sequence[Result] | None = None) -> list[TableRow]:
    """Return one row per point, or per given result of the group, fastest first."""
    front = {id(result) for result in group.front()}
    return [
        TableRow(
            name_of(result),
            [column.cell(result) for column in columns],
            id(result) in front,
            result.is_baseline,
            point_label(result, list(result.knobs)),
            result.composition,
        )
        for result in (group.results if results is None else results)
    ]


def baseline_row(group: Group, columns: Sequence[TableColumn]) -> TableRow | None:
    """Return the row of a baseline that was timed beside the points but is none itself; else None."""
    beside = [one for one in group.results if one.baseline_latency_s is not None and one.baseline_tokens_per_s]
    if not beside or any(one.is_baseline for one in group.results):
        return None
    latencies = [one.baseline_latency_s for one in beside]
    typical = Latency(*(median(getattr(each, field.name) for each in latencies) for field in fields(Latency)))
    result = replace(
        beside[0],
        policy=str(group.setting.baseline),
        knobs={},
        quality=Quality(metric=group.metric, value=group.baseline_quality, low=None, high=None),
        further_qualities={
            name: Quality(metric=one.metric, value=one.baseline, low=None, high=None)
            for name, one in beside[0].further_qualities.items()
        },
        change=None,
        latency_s=typical,
        speedup=Speedup(value=1.0),
        tokens=round(beside[0].baseline_tokens_per_s * beside[0].baseline_latency_s.total),
        tokens_per_s=median(one.baseline_tokens_per_s for one in beside),
        counts=Counts(),
        agreement_with_target=None,
        certificate=None,
        peak_memory_mb=None,
    )
    name, *numbers = [column.cell(result) for column in columns]
    points = f"{len(beside)} point{'' if len(beside) == 1 else 's'}"
    return TableRow("", [replace(name, detail=f"timed beside {points}"), *numbers], is_baseline=True)


def front_points(group: Group) -> list[FrontPoint]:
    """Return the Pareto front, fastest first, in words."""
    found = []
    for result in group.front():
        quality = result.quality
        bounds = signed_interval(quality.difference_low, quality.difference_high)
        change = f", {signed(quality.difference)} {bounds}" if quality.difference is not None else ""
        speed = times(result.speedup.value) if group.relative else duration(result.latency_s.mean)
        label = point_label(result, group.knobs(result))
        numbers = f"{speed}, {group.metric} {number(quality.value)}{change}"
        if why := disturbance(result.environment):
            numbers += f"; {why}"
        found.append(FrontPoint(name_of(result), label, numbers))
    return found


def name_of(result: Result) -> str:
    """The name of the point's folder."""
    return result.point if result.folder is None else result.folder.name


def fixed_knobs(group: Group) -> list[str]:
    """Say which knobs had one value in all points of a policy: `bild: window 10, verify_tail on`."""
    varying = set(group.varying_knobs())
    lines: dict[str, str] = {}
    for result in group.results:
        fixed = [f"{knob} {knob_value(value)}" for knob, value in result.knobs.items() if knob not in varying]
        if fixed:
            lines[result.policy] = f"{result.policy}: {', '.join(fixed)}"
    return list(lines.values())


def best_columns(group: Group) -> list[TableColumn]:
    """Return the columns of the best points: speedup, quality, difference, agreement with the target."""
    return [
        column_of(COLUMNS["speedup"], speedup_cell),
        TableColumn(group.metric, COLUMNS["quality"].explanation, _quality),
        column_of(COLUMNS["quality_difference"], difference_cell),
        *further_columns(group),
        column_of(COLUMNS["agreement_with_target"], lambda result: TableCell(percent(result.agreement_with_target))),
    ]


def best_rows(group: Group) -> list[BestRow]:
    """Return the rows "no loss measured" and "one point of loss"; none without a baseline or with few examples."""
    if not group.relative or not group.enough:
        return []
    rows = []
    for title, loss in (("no loss measured", 0.0), ("one point of loss", 1.0)):
        best = group.best(loss)
        knobs = [] if best is None else [(knob, knob_value(value)) for knob, value in best.knobs.items()]
        cells = [] if best is None else [column.cell(best) for column in best_columns(group)]
        rows.append(BestRow(title, best, knobs, cells))
    return rows


def hypervolumes(group: Group) -> list[PolicyVolume]:
    """Return each policy's hypervolume up to relative latency 1 and `MARGIN` below the baseline, largest first.

    Empty without a baseline, as the reference point is relative to it.
    """
    if not group.relative or group.baseline_quality is None:
        return []
    reference = (1.0, group.baseline_quality - MARGIN)
    found = []
    for policy in group.policies:
        positions = [group.position(result) for result in group.of_policy(policy)]
        points = [(position.x, position.y) for position in positions if position is not None]
        if points:
            found.append(PolicyVolume(policy, len(points), hypervolume(points, reference)))
    return sorted(found, key=lambda one: -one.hypervolume)


def time_shares(results: Sequence[Result]) -> list[Share]:
    """Return where the time of all points went, largest part first, as shares of the total."""
    total = sum(result.total_s for result in results)
    names = dict.fromkeys(name for result in results for name in result.seconds if name != "total")
    parts = {name: sum(result.seconds.get(name, 0.0) for result in results) for name in names}
    rest = total - sum(parts.values())
    if rest > 0.001 * total:
        parts["other"] = rest
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return [Share(name, duration(s), s / total, percent(s / total, 1)) for name, s in ordered] if total > 0 else []


def environments(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return what the points were measured on; a value that differs is given with its counts."""
    lines = []
    for key in dict.fromkeys(key for result in results for key in result.environment):
        values = [result.environment.get(key) for result in results]
        texts = ["none" if value is None else str(value) for value in values]
        counts = {text: texts.count(text) for text in sorted(set(texts))}
        if key in ("started", "load_average", "busy_elsewhere_percent") and len(counts) > 1:
            known = [value for value in values if value is not None]
            lines.append((key, f"{min(known)} to {max(known)}"))
        elif len(counts) == 1:
            lines.append((key, texts[0]))
        else:
            lines.append((key, "; ".join(f"{text} ({count} points)" for text, count in counts.items())))
    return lines


def speedup_cell(result: Result, category: Category | None = None) -> TableCell:
    """The speedup of a result, or of a category of it, with its interval and what disturbed the timing."""
    speedup = (category or result).speedup
    bounds = interval(speedup.low, speedup.high)
    detail = ", ".join(text for text in (bounds, disturbance(result.environment)) if text)
    return TableCell(times(speedup.value), detail, speedup.value)


def _knob_cell(knob: str) -> Callable[[Result], TableCell]:
    def cell(result: Result) -> TableCell:
        if knob not in result.knobs:
            return TableCell("")
        value = result.knobs[knob]
        ordered = value if isinstance(value, int | float | str) else str(value)
        return TableCell(knob_value(value), "", ordered)

    return cell


def _quality(result: Result) -> TableCell:
    quality = result.quality
    return TableCell(number(quality.value), interval(quality.low, quality.high), quality.value)


def difference_cell(result: Result) -> TableCell:
    """The quality's difference from the baseline's, with its interval."""
    quality = result.quality
    bounds = signed_interval(quality.difference_low, quality.difference_high)
    return TableCell(signed(quality.difference), bounds, quality.difference)


def _latency(result: Result) -> TableCell:
    latency = result.latency_s
    return TableCell(duration(latency.median), f"p95 {duration(latency.p95)}", latency.median)
