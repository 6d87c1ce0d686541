"""Tables as plain values, which the page, the terminal, Markdown and LaTeX write: columns, rows and
cells, and the table of all points of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from bild_lab.lab.schema.formatting import (
    MISSING,
    counted,
    duration,
    interval,
    number,
    point_label,
    short_value,
    signed,
    times,
)
from bild_lab.lab.schema.numbers import Category, MetricScale, NonInferiority, Speedup
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.lab.schema.statistics import are_enough
from bild_lab.lab.store.groups import Group
from bild_lab.report.phrases import difference_interval, p_value_words, signed_difference
from bild_lab.report.provenance import disturbance

OVERALL = "overall"  # the category of all examples
NO_WORSE = "no worse"
# the columns of every point after those of its quality
_POINT_COLUMNS = (
    "latency_s_median",
    "first_token_s",
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
    "joules_per_token",
)
CATEGORY_COLUMNS = (
    "n_examples",
    "speedup",
    "tokens_per_s",
    "tokens_per_target_call",
    "acceptance_rate",
)
_QUALITIES = ("quality", "quality_difference")
_SIGNED = ("quality_difference", "log_probability_difference")


@dataclass(frozen=True)
class TableCell:
    """One table cell: its text, a smaller second line, what to sort it by, and its class in
    `report.css`.
    """

    text: str
    detail: str = ""
    order: float | str | None = None
    tone: str = ""


@dataclass(frozen=True)
class TableColumn:
    """One column of a table: its title, what the title means, how a cell is made."""

    title: str
    hint: str = ""
    cell: Callable[[Any], TableCell] = lambda cell: cell


@dataclass(frozen=True)
class TableRow:
    """One row.

    point: the name of its point's folder, empty if it is no point. label: policy and all knobs.
    composition: the policy as its parts compose it.
    """

    cells: Sequence[TableCell]
    point: str = ""
    on_front: bool = False
    is_baseline: bool = False
    label: str = ""
    composition: str = ""


@dataclass(frozen=True)
class Table:
    """A table for the template. It is false without rows."""

    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]

    def __bool__(self) -> bool:
        return bool(self.rows)


def number_cell(value: float | None, digits: int = 2) -> TableCell:
    """A number, by which the column is sorted: as a text 1,234 comes before 987."""
    return TableCell(number(value, digits), "", value)


def plain_table(rows: Sequence[Mapping[str, str | TableCell]]) -> Table:
    """A table whose rows name their columns."""
    cells = [
        [cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row.values()]
        for row in rows
    ]
    return Table(
        [TableColumn(title) for title in (rows[0] if rows else ())],
        [TableRow(row) for row in cells],
    )


def results_table(group: Group, columns: Sequence[TableColumn], results: Sequence[Result]) -> Table:
    """One row for each of these results of the group, in their order."""
    rows = [
        TableRow(
            [column.cell(result) for column in columns],
            folder_name(result),
            group.is_on_front(result),
            result.is_baseline,
            point_label(result, list(result.knobs)),
            result.composition,
        )
        for result in results
    ]
    return Table(columns, rows)


def folder_name(result: Result) -> str:
    """The name of the point's folder."""
    return result.point if result.folder is None else result.folder.name


def points_table(group: Group) -> Table:
    """Every point, fastest first; last what was timed beside all.

    On a narrow screen the first columns must do: the policy with its knobs, speedup and quality.
    Then comes every knob that varies, to sort by, and the other numbers.
    """
    certified = any(result.certificate is not None for result in group.results)
    columns = [
        policy_column(group),
        column_of("speedup"),
        *quality_columns(group),
        *(
            TableColumn(knob, f"knob of the policy: {knob}", partial(_knob_cell, group, knob))
            for knob in group.varying_knobs()
        ),
        *([_certificate_column()] if certified else []),
        *map(column_of, _POINT_COLUMNS),
    ]
    table = results_table(group, columns, group.results)
    baseline_row = _baseline_row(group, columns)
    return table if baseline_row is None else replace(table, rows=[*table.rows, baseline_row])


def column_of(name: str) -> TableColumn:
    """The column of a number of the result, with its interval below it if it has one."""
    return TableColumn(
        COLUMNS[name].title, COLUMNS[name].explanation, lambda result: cell_of(result, name)
    )


def cell_of(result: Result, name: str) -> TableCell:
    """A number of a result, with its interval below it if it has one. A difference has its sign."""
    column, value = COLUMNS[name], COLUMNS[name].of(result)
    if name in _QUALITIES:
        column = replace(column, digits=result.quality.scale.digits)
    if name == "speedup":
        return speedup_cell(result.speedup, result)
    if name == "latency_s_median" and result.timed:
        return TableCell(duration(value), f"p95 {duration(result.latency_s.p95)}", value)
    low, high = (
        COLUMNS[end].of(result) if end in COLUMNS else None
        for end in (f"{name}_low", f"{name}_high")
    )
    if name in _SIGNED:
        return TableCell(
            signed(value, column.digits), interval(low, high, column.digits, signed), value
        )
    return TableCell(column.text(result), interval(low, high, column.digits), value)


def speedup_cell(speedup: Speedup, result: Result) -> TableCell:
    """A speedup that was measured for this result, with its interval and what disturbed the
    timing.
    """
    details = (interval(speedup.low, speedup.high), disturbance(result))
    return TableCell(times(speedup.value), ", ".join(filter(None, details)), speedup.value)


def policy_column(group: Group) -> TableColumn:
    """The column that names a point by its policy and the knobs that distinguish it."""

    def cell(result: Result) -> TableCell:
        knobs = "baseline" if result.is_baseline else group.knob_label(result)
        return TableCell(result.policy, knobs, result.policy)

    return replace(column_of("policy"), cell=cell)


def quality_columns(group: Group) -> list[TableColumn]:
    """The leading metric, its difference from the baseline's, and both of each further metric."""
    further = {
        name: quality.metric
        for result in group.results
        for name, quality in result.further_qualities.items()
    }
    hint = (
        "The metric of the point’s outputs; below it the difference from the baseline with its"
        " paired 95 % interval."
    )
    return [
        replace(column_of("quality"), title=group.metric),
        column_of("quality_difference"),
        *([_non_inferiority_column(group)] if is_tested(group.results) else []),
        *(
            TableColumn(title, hint, partial(_further_cell, name))
            for name, title in further.items()
        ),
    ]


def is_tested(results: Sequence[Result]) -> bool:
    """Whether one of these points was tested for being no worse than the baseline by a margin."""
    return any(result.quality.non_inferiority is not None for result in results)


def non_inferiority_title(results: Sequence[Result]) -> str:
    """`no worse by 5`; of several margins the cells have to tell."""
    tested = (result.quality for result in results if result.quality.non_inferiority is not None)
    margins = {quality.scale.amount(quality.non_inferiority.margin) for quality in tested}
    return f"{NO_WORSE} by {margins.pop()}" if len(margins) == 1 else NO_WORSE


def non_inferiority_cell(
    tested: NonInferiority | None, enough: bool, scale: MetricScale
) -> TableCell:
    """`yes` or `not shown`, with the p-value; a dash for a point that was not tested. enough:
    whether there are enough examples to say yes. scale: of the metric.
    """
    if tested is None:
        return TableCell(MISSING)
    details = [p_value_words(tested.p_value), f"margin {scale.amount(tested.margin)}"]
    if tested.lower_bound is not None:
        details.insert(1, f"at least {signed(tested.lower_bound, scale.digits)}")
    return TableCell(
        "yes" if tested.shown and enough else "not shown",
        ", ".join(details),
        tested.p_value,
    )


def _non_inferiority_column(group: Group) -> TableColumn:
    names = ("margin", "lower_bound", "p_value")
    return TableColumn(
        non_inferiority_title(group.results),
        " ".join(COLUMNS[f"non_inferiority_{name}"].explanation for name in names),
        lambda result: non_inferiority_cell(
            result.quality.non_inferiority,
            are_enough(result.counted_texts),
            result.quality.scale,
        ),
    )


def categories_of(result: Result) -> dict[str, Category]:
    """What was measured in each category of the dataset, and over all examples (BiTA Table 7);
    empty without categories. A speedup of too few texts has no interval.
    """
    if not result.categories:
        return {}
    overall = Category(
        n_examples=result.answered_texts,
        independent_texts=result.counted_texts,
        tokens=result.tokens,
        tokens_per_s=result.tokens_per_s,
        baseline_tokens_per_s=result.baseline_tokens_per_s,
        tokens_per_s_ratio=result.tokens_per_s_ratio,
        speedup=result.speedup,
        tokens_per_target_call=result.counts.tokens_per_target_call,
        acceptance_rate=result.counts.acceptance_rate,
    )
    categories = {**result.categories, OVERALL: overall}
    return {name: _without_narrow_interval(category) for name, category in categories.items()}


def _without_narrow_interval(category: Category) -> Category:
    """The category, without the interval of its speedup if that is over too few texts."""
    known = category.independent_texts
    if are_enough(category.n_examples if known is None else known):
        return category
    return replace(category, speedup=replace(category.speedup, low=None, high=None))


def _baseline_row(group: Group, columns: Sequence[TableColumn]) -> TableRow | None:
    """The row of a baseline that is no point itself, with the medians of what was timed beside the
    points. None if the baseline is a point, or if none was timed.
    """
    beside = [
        result
        for result in group.results
        if result.baseline_latency_s is not None and result.baseline_tokens_per_s
    ]
    if not beside or any(result.is_baseline for result in group.results):
        return None
    latency_s = median(result.baseline_latency_s.median for result in beside)
    p95_s = median(result.baseline_latency_s.p95 for result in beside)
    rate = median(result.baseline_tokens_per_s for result in beside)
    points = f"timed beside {counted(len(beside), 'point')}"
    cells = {
        **dict.fromkeys(group.varying_knobs(), TableCell("")),
        COLUMNS["policy"].title: TableCell(str(group.setting.baseline), points),
        COLUMNS["speedup"].title: TableCell(times(1.0), "", 1.0),
        COLUMNS["latency_s_median"].title: TableCell(
            duration(latency_s), f"p95 {duration(p95_s)}", latency_s
        ),
        COLUMNS["tokens_per_s"].title: number_cell(rate, 1),
        group.metric: number_cell(group.baseline_quality, group.scale.digits),
    }
    for quality in beside[0].further_qualities.values():
        cells[quality.metric] = number_cell(quality.baseline, quality.scale.digits)
    return TableRow(
        [cells.get(column.title, TableCell(MISSING)) for column in columns], is_baseline=True
    )


def _knob_cell(group: Group, knob: str, result: Result) -> TableCell:
    if knob not in result.knobs:
        return TableCell("")
    value = result.knobs[knob]
    order = value if isinstance(value, int | float | str) else str(value)
    others = (other.knobs[knob] for other in group.results if knob in other.knobs)
    return TableCell(short_value(value, others), "", order)


def _further_cell(name: str, result: Result) -> TableCell:
    quality = result.further_qualities.get(name)
    if quality is None:
        return TableCell(MISSING)
    value = number_cell(quality.value, quality.scale.digits)
    if quality.difference is None:
        return value
    change = f"{signed_difference(quality)} {difference_interval(quality)}"
    return replace(value, detail=change)


def _certificate_column() -> TableColumn:
    def cell(result: Result) -> TableCell:
        certificate = result.certificate
        if certificate is None:
            return TableCell(MISSING)
        defects = f"{certificate.defects} defects"
        if certificate.unjudged and not result.failed_texts:
            words = f"{certificate.unjudged} not judged"
            return TableCell(words, f"no closed form, {defects}", certificate.defects)
        if certificate.unjudged:
            defects += f", {certificate.unjudged} without a text"
        if certificate.rounding is None:  # greedy
            equal, ties = f"{certificate.equal} equal", f"{certificate.ties} ties"
        else:
            equal, ties = f"{certificate.equal} exact", f"{certificate.ties} rounding"
        return TableCell(equal, f"{ties}, {defects}", certificate.defects)

    names = ("certificate_equal", "certificate_ties", "certificate_defects")
    return TableColumn("certificate", " ".join(COLUMNS[name].explanation for name in names), cell)
