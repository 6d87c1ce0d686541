"""The tables of the HTML report, as plain values for its template."""

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
    knob_label,
    knob_value,
    number,
    percent,
    point_label,
    signed,
    times,
)
from bild_lab.lab.schema.numbers import Category, Speedup
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.lab.store.groups import BatchCurve, Group
from bild_lab.report.provenance import disturbance

OVERALL = "overall"
# the columns of every point after those of its quality
_POINT = (
    *(
        "latency_s_median",
        "first_token_s",
        "tokens_per_s",
        "tokens_per_target_call",
        "acceptance_rate",
    ),
    *(
        "nothing_accepted",
        "agreement_with_target",
        "p_value",
        "fallbacks",
        "rollbacks",
        "drafted",
        "accepted",
    ),
    *("target_calls", "draft_calls", "tokens", "peak_memory_mb", "joules_per_token"),
)
_CHANGE = (
    "changed",
    "first_difference",
    "length_ratio",
    "log_probability",
    "log_probability_difference",
)
_PREDICTION = (
    *("speedup", "predicted_theorem", "predicted_rounds", "predicted_host", "predicted_prefill"),
    *("predicted_cost_ratio", "acceptance_rate", "predicted_window"),
)
_COST = (
    "flops_per_token",
    "bytes_per_token",
    "flops_per_byte",
    "flops_ratio",
    "bytes_ratio",
    "intensity_ratio",
)
_SIGNED = ("quality_difference", "log_probability_difference")
CATEGORY = ("n_examples", "speedup", "tokens_per_s", "tokens_per_target_call", "acceptance_rate")


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
    cell: Callable[[Any], TableCell] = lambda one: one


@dataclass(frozen=True)
class TableRow:
    """One row. point: the name of its point's folder, empty if it is no point. label: policy and
    all knobs.
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


def plain_table(rows: Sequence[Mapping[str, str | TableCell]]) -> Table:
    """A table whose rows name their columns."""
    cells = [
        [one if isinstance(one, TableCell) else TableCell(one) for one in row.values()]
        for row in rows
    ]
    return Table(
        [TableColumn(title) for title in (rows[0] if rows else ())],
        [TableRow(row) for row in cells],
    )


def table_of(group: Group, columns: Sequence[TableColumn], results: Sequence[Result]) -> Table:
    """One row for each of these results of the group, in their order."""
    front = {id(result) for result in group.front()}
    rows = [
        TableRow(
            [column.cell(result) for column in columns],
            name_of(result),
            id(result) in front,
            result.is_baseline,
            point_label(result, list(result.knobs)),
            result.composition,
        )
        for result in results
    ]
    return Table(columns, rows)


def name_of(result: Result) -> str:
    """The name of the point's folder."""
    return result.point if result.folder is None else result.folder.name


def tables(group: Group) -> dict[str, Table]:
    """Every table of a setting except that of all points; those for which nothing was measured have
    no rows.
    """
    shown = group.selected()
    policy = policy_column(group)
    change = [policy, *quality_columns(group)[1:], *map(column_of, _CHANGE)]
    changed = [one for one in shown if one.change is not None and not one.is_baseline]
    predicted = [one for one in shown if one.prediction is not None]
    counted = [one for one in shown if one.cost is not None]
    return {
        "best": best_table(group),
        "change": table_of(group, change, changed),
        "categories": category_table(group),
        "predicted": table_of(group, [policy, *map(column_of, _PREDICTION)], predicted),
        "traffic": table_of(group, [policy, *map(column_of, _COST)], counted),
        "rounding": rounding_table(group),
    }


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
            TableColumn(knob, f"knob of the policy: {knob}", partial(_knob_cell, knob))
            for knob in group.varying_knobs()
        ),
        *([_certificate_column()] if certified else []),
        *map(column_of, _POINT),
    ]
    table = table_of(group, columns, group.results)
    beside = _baseline_row(group, columns)
    return table if beside is None else replace(table, rows=[*table.rows, beside])


def column_of(name: str) -> TableColumn:
    """The column of a number of the result, with its interval below it if it has one."""
    return TableColumn(
        COLUMNS[name].title, COLUMNS[name].explanation, lambda result: cell_of(result, name)
    )


def cell_of(result: Result, name: str) -> TableCell:
    """A number of a result, with its interval below it if it has one. A difference has its sign."""
    column, value = COLUMNS[name], COLUMNS[name].of(result)
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
        knobs = "baseline" if result.is_baseline else knob_label(result, group.knobs(result))
        return TableCell(result.policy, knobs, result.policy)

    return replace(column_of("policy"), cell=cell)


def quality_columns(group: Group) -> list[TableColumn]:
    """The leading metric, its difference from the baseline's, and both of each further metric."""
    further = {
        name: one.metric
        for result in group.results
        for name, one in result.further_qualities.items()
    }
    hint = (
        "The metric of the point’s outputs; below it the difference from the baseline with its"
        " paired 95 % interval."
    )
    return [
        replace(column_of("quality"), title=group.metric),
        column_of("quality_difference"),
        *(
            TableColumn(title, hint, partial(_further_cell, name))
            for name, title in further.items()
        ),
    ]


def best_table(group: Group) -> Table:
    """The fastest points where no loss was measured and within one point of loss.

    No rows without a baseline, or with too few examples to call a point the fastest.
    """
    columns = [column_of("speedup"), *quality_columns(group), column_of("agreement_with_target")]
    rows = []
    for title, loss in (("no loss measured", 0.0), ("one point of loss", 1.0)):
        best = group.best(loss)
        if best is None:
            cells = [TableCell(MISSING)] * len(columns)
            last = TableCell(f"no point kept the quality of {group.setting.baseline} to {title}")
        else:
            cells = [column.cell(best) for column in columns]
            cells[0] = replace(cells[0], tone="" if disturbance(best) else "big")
            last = TableCell(best.policy, knob_label(best, group.knobs(best)))
        rows.append(TableRow([TableCell(title, tone="title"), *cells, last]))
    known = group.relative and group.has_enough_examples
    return Table(
        [TableColumn("allowed"), *columns, TableColumn("policy, knobs")], rows if known else []
    )


def categories_of(result: Result) -> dict[str, Category]:
    """What was measured in each category of the dataset, and over all examples (BiTA Table 7); else
    nothing.
    """
    overall = Category(
        n_examples=result.setting.n_examples,
        tokens=result.tokens,
        tokens_per_s=result.tokens_per_s,
        baseline_tokens_per_s=result.baseline_tokens_per_s,
        tokens_per_s_ratio=result.tokens_per_s_ratio,
        speedup=result.speedup,
        tokens_per_target_call=result.counts.tokens_per_target_call,
        acceptance_rate=result.counts.acceptance_rate,
    )
    return {**result.categories, OVERALL: overall} if result.categories else {}


def category_table(group: Group) -> Table:
    """A row for every category of the selected points, each category's fastest point first."""
    measured = {id(one): categories_of(one) for one in group.selected() if not one.is_baseline}
    names = list(
        dict.fromkeys(name for each in measured.values() for name in each if name != OVERALL)
    )
    policy = policy_column(group)
    rows = []
    for name in [*names, OVERALL]:
        for result in group.selected():
            if (one := measured.get(id(result), {}).get(name)) is not None:
                base = (
                    ""
                    if one.baseline_tokens_per_s is None
                    else number(one.baseline_tokens_per_s, 1)
                )
                cells = [
                    TableCell(name, "", name),
                    policy.cell(result),
                    TableCell(number(one.n_examples, 0), "", one.n_examples),
                    speedup_cell(one.speedup, result),
                    TableCell(number(one.tokens_per_s, 1), base, one.tokens_per_s),
                    TableCell(number(one.tokens_per_target_call), "", one.tokens_per_target_call),
                    TableCell(percent(one.acceptance_rate, 1), "", one.acceptance_rate),
                ]
                rows.append(TableRow(cells))
    columns = [
        TableColumn("category", "The category of the dataset."),
        policy,
        *map(column_of, CATEGORY),
    ]
    return Table(columns, rows)


def rounding_table(group: Group) -> Table:
    """Of each sampled point, what its rule and its rounding change of the target's distribution, by
    number of rows.
    """
    certified = [
        one for one in group.results if one.certificate is not None and one.certificate.rounding
    ]
    counts = sorted({int(count) for one in certified for count in one.certificate.rounding})

    def rows_column(count: int) -> TableColumn:
        hint = (
            f"the largest total variation between a forward of {count} rows and one row after"
            " another"
        )
        title = counted(count, "row")
        return TableColumn(
            title, hint, lambda one: _variation(one.certificate.rounding.get(str(count)))
        )

    change = COLUMNS["certificate_output"]
    rule = TableColumn("rule", change.explanation, lambda one: _variation(change.of(one)))
    return table_of(group, [policy_column(group), rule, *map(rows_column, counts)], certified)


def batch_table(curves: Sequence[BatchCurve]) -> Table:
    """What each policy did at every number of texts at once."""
    rows = []
    for curve in curves:
        even, most = curve.break_even, curve.points[-1].setting.batch
        for result in curve.points:
            rows.append(
                {
                    "policy": curve.label,
                    "batch": TableCell(str(result.setting.batch), "", result.setting.batch),
                    "speedup": speedup_cell(result.speedup, result),
                    "tokens/s": number(result.tokens_per_s, 0),
                    "baseline, tokens/s": number(result.baseline_tokens_per_s, 0),
                    "median latency, ms": number(1000 * result.latency_s.median, 0),
                    "p95, ms": number(1000 * result.latency_s.p95, 0),
                    "break-even batch": f"none up to {most}" if even is None else number(even, 1),
                }
            )
    return plain_table(rows)


def _baseline_row(group: Group, columns: Sequence[TableColumn]) -> TableRow | None:
    """The row of a baseline that is no point itself, of the medians of what was timed beside the
    points; else None.
    """
    beside = [
        one
        for one in group.results
        if one.baseline_latency_s is not None and one.baseline_tokens_per_s
    ]
    if not beside or any(one.is_baseline for one in group.results):
        return None
    points = f"timed beside {counted(len(beside), 'point')}"
    middle, late = (
        median(getattr(one.baseline_latency_s, end) for one in beside) for end in ("median", "p95")
    )
    rate = median(one.baseline_tokens_per_s for one in beside)
    further = beside[0].further_qualities.values()
    known = {
        **dict.fromkeys(group.varying_knobs(), TableCell("")),
        COLUMNS["policy"].title: TableCell(str(group.setting.baseline), points),
        COLUMNS["speedup"].title: TableCell(times(1.0), "", 1.0),
        COLUMNS["latency_s_median"].title: TableCell(
            duration(middle), f"p95 {duration(late)}", middle
        ),
        COLUMNS["tokens_per_s"].title: TableCell(number(rate, 1), "", rate),
        group.metric: TableCell(number(group.baseline_quality), "", group.baseline_quality),
        **{one.metric: TableCell(number(one.baseline), "", one.baseline) for one in further},
    }
    return TableRow(
        [known.get(column.title, TableCell(MISSING)) for column in columns], is_baseline=True
    )


def _knob_cell(knob: str, result: Result) -> TableCell:
    if knob not in result.knobs:
        return TableCell("")
    value = result.knobs[knob]
    return TableCell(
        knob_value(value), "", value if isinstance(value, int | float | str) else str(value)
    )


def _further_cell(name: str, result: Result) -> TableCell:
    quality = result.further_qualities.get(name)
    if quality is None:
        return TableCell(MISSING)
    bounds = interval(quality.difference_low, quality.difference_high, write=signed)
    change = "" if quality.difference is None else f"{signed(quality.difference)} {bounds}"
    return TableCell(number(quality.value), change, quality.value)


def _certificate_column() -> TableColumn:
    def cell(result: Result) -> TableCell:
        found = result.certificate
        if found is None:
            return TableCell(MISSING)
        if found.unjudged:
            return TableCell("no closed form", f"{found.defects} defects", found.defects)
        # greedy; sampled
        same, other = ("equal", "ties") if found.rounding is None else ("exact", "rounding")
        return TableCell(
            f"{found.equal} {same}", f"{found.ties} {other}, {found.defects} defects", found.defects
        )

    names = ("certificate_equal", "certificate_ties", "certificate_defects")
    return TableColumn("certificate", " ".join(COLUMNS[name].explanation for name in names), cell)


def _variation(value: float | None) -> TableCell:
    """A total variation, of which the order of magnitude counts."""
    if value is None:
        return TableCell(MISSING)
    return TableCell("0" if value == 0 else f"{value:.1e}", order=value)
