"""A table of the HTML report: quality lost, and what changed in the texts."""

from __future__ import annotations

from collections.abc import Callable

from bild_lab.lab.formatting import MISSING, interval, signed, signed_interval
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.report.page.tables import (
    TableCell,
    TableColumn,
    TableRow,
    column_of,
    difference_cell,
    further_columns,
    point_rows,
    policy_column,
)


def change_table(group: Group) -> tuple[list[TableColumn], list[TableRow]]:
    """Return columns and rows of the selected points that know what they changed; older results do not."""
    quality = COLUMNS["quality_difference"]
    columns = [
        policy_column(group),
        TableColumn(f"{group.metric}, difference", quality.explanation, difference_cell),
        *further_columns(group),
        column_of(COLUMNS["changed"]),
        column_of(COLUMNS["first_difference"]),
        column_of(COLUMNS["length_ratio"], _with_interval("length_ratio")),
        column_of(COLUMNS["log_probability"], _with_interval("log_probability")),
        column_of(COLUMNS["log_probability_difference"], _difference),
    ]
    shown = [one for one in group.selected() if one.change is not None and not one.is_baseline]
    return columns, point_rows(group, columns, shown)


def _with_interval(name: str) -> Callable[[Result], TableCell]:
    column, digits = COLUMNS[name], COLUMNS[name].digits

    def cell(result: Result) -> TableCell:
        bounds = interval(COLUMNS[f"{name}_low"].of(result), COLUMNS[f"{name}_high"].of(result), digits)
        return TableCell(column.text(result), bounds, column.of(result))

    return cell


def _difference(result: Result) -> TableCell:
    found = result.change
    if found is None or found.log_probability_difference is None:
        return TableCell(MISSING)
    bounds = signed_interval(found.log_probability_difference_low, found.log_probability_difference_high, 3)
    return TableCell(signed(found.log_probability_difference, 3), bounds, found.log_probability_difference)
