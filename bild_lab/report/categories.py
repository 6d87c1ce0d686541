"""Speed by category of the dataset, for the report and the terminal (BiTA Table 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bild_lab.lab.formatting import interval, knob_label, number, percent, point_label
from bild_lab.lab.results.groups import Group, by_setting
from bild_lab.lab.schema.numbers import Category
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.report.page.tables import TableCell, TableColumn, TableRow, speedup_cell
from bild_lab.report.provenance import disturbance

OVERALL = "overall"
_NUMBERS = ("n_examples", "speedup", "tokens_per_s", "tokens_per_target_call", "acceptance_rate")


@dataclass(frozen=True)
class CategoryOfPoint:
    """What was measured of one point in one category. knobs: the text of those that distinguish the point."""

    result: Result
    knobs: str
    name: str
    numbers: Category


def category_table(group: Group) -> tuple[list[TableColumn], list[TableRow]]:
    """Return columns, and a row for every category of the selected points; no rows without categories."""
    results = [result for result in group.selected() if result.categories and not result.is_baseline]
    found = [one for result in results for one in _categories(group, result)]
    order = list(dict.fromkeys(one.name for one in found if one.name != OVERALL))
    found.sort(key=lambda one: [*order, OVERALL].index(one.name))  # stable: the fastest point first
    return _COLUMNS, [TableRow(one.result.point, [column.cell(one) for column in _COLUMNS]) for one in found]


def terminal_table(results: Sequence[Result]) -> Table | None:
    """Tabulate each setting's best point at no loss, or its fastest, by category; None without categories."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("category", overflow="fold")
    for name in _NUMBERS:
        table.add_column(COLUMNS[name].short_title, justify="right", no_wrap=True)
    for group in by_setting(results):
        best = group.best(0.0) or group.results[0]
        if not best.categories:
            continue
        why = disturbance(best.environment)
        table.add_row(Text(point_label(best, group.knobs(best)) + (f", {why}" if why else ""), style="bold"))
        for one in _categories(group, best):
            numbers, speedup = one.numbers, one.numbers.speedup
            faster = f"{number(speedup.value)} {interval(speedup.low, speedup.high)}".strip()
            cells = [one.name, number(numbers.n_examples, 0), faster, number(numbers.tokens_per_s, 1)]
            cells += [number(numbers.tokens_per_target_call), percent(numbers.acceptance_rate).replace(" ", "")]
            table.add_row(*map(Text, cells))
        table.add_section()
    return table if table.row_count else None


def _categories(group: Group, result: Result) -> list[CategoryOfPoint]:
    """What was measured in each category, and over all examples."""
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
    knobs = knob_label(result, group.knobs(result))
    return [
        CategoryOfPoint(result, knobs, name, numbers)
        for name, numbers in {**result.categories, OVERALL: overall}.items()
    ]


def _rate(one: CategoryOfPoint) -> TableCell:
    own, base = one.numbers.tokens_per_s, one.numbers.baseline_tokens_per_s
    return TableCell(number(own, 1), "" if base is None else number(base, 1), own)


_CELLS = {
    "n_examples": lambda one: TableCell(number(one.numbers.n_examples, 0), "", one.numbers.n_examples),
    "speedup": lambda one: speedup_cell(one.result, one.numbers),
    "tokens_per_s": _rate,
    "tokens_per_target_call": lambda one: TableCell(
        number(one.numbers.tokens_per_target_call), "", one.numbers.tokens_per_target_call
    ),
    "acceptance_rate": lambda one: TableCell(percent(one.numbers.acceptance_rate, 1), "", one.numbers.acceptance_rate),
}
_COLUMNS = [
    TableColumn("category", "The category of the dataset.", lambda one: TableCell(one.name, "", one.name)),
    TableColumn(
        COLUMNS["policy"].title,
        COLUMNS["policy"].explanation,
        lambda one: TableCell(one.result.policy, one.knobs, one.result.policy),
    ),
    *(TableColumn(COLUMNS[name].title, COLUMNS[name].explanation, _CELLS[name]) for name in _NUMBERS),
]
