"""Two tables of the HTML report: predicted beside measured speed, and operations beside memory traffic."""

from __future__ import annotations

from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.result import COLUMNS, COSTS, PREDICTION
from bild_lab.report.page.tables import TableColumn, TableRow, column_of, point_rows, policy_column


def prediction_table(group: Group) -> tuple[list[TableColumn], list[TableRow]]:
    """Return columns and rows of the selected points that drafted."""
    cost_ratio, *steps = PREDICTION
    shown = [cost_ratio, COLUMNS["traced_acceptance_rate"], *steps, COLUMNS["traced_speedup"]]
    columns = [policy_column(group), *(column_of(column) for column in shown)]
    return columns, point_rows(group, columns, [one for one in group.selected() if one.prediction is not None])


def cost_table(group: Group) -> tuple[list[TableColumn], list[TableRow]]:
    """Return columns and rows of the selected points whose forward passes were recorded."""
    columns = [policy_column(group), *(column_of(column) for column in COSTS)]
    return columns, point_rows(group, columns, [one for one in group.selected() if one.cost is not None])
