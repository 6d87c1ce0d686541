"""The tables of the page that the terminal does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bild_lab.lab.schema.formatting import MISSING, counted, number, percent
from bild_lab.lab.schema.numbers import Category
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.lab.schema.statistics import best_at_loss
from bild_lab.lab.store.batch_curves import BatchCurve
from bild_lab.lab.store.groups import Group
from bild_lab.report.provenance import disturbance
from bild_lab.report.tables import (
    CATEGORY_COLUMNS,
    OVERALL,
    Table,
    TableCell,
    TableColumn,
    TableRow,
    categories_of,
    column_of,
    number_cell,
    plain_table,
    policy_column,
    quality_columns,
    results_table,
    speedup_cell,
)

_CHANGE_COLUMNS = (
    "changed",
    "first_difference",
    "length_ratio",
    "log_probability",
    "log_probability_difference",
)
_PREDICTION_COLUMNS = (
    "speedup",
    "predicted_theorem",
    "predicted_rounds",
    "predicted_host",
    "predicted_prefill",
    "predicted_cost_ratio",
    "acceptance_rate",
    "predicted_window",
)
_COST_COLUMNS = (
    "flops_per_token",
    "bytes_per_token",
    "flops_per_byte",
    "flops_ratio",
    "bytes_ratio",
    "intensity_ratio",
)


def setting_tables(group: Group) -> dict[str, Table]:
    """Every table of a setting except that of all points; those for which nothing was measured have
    no rows.
    """
    shown = group.selected()
    policy = policy_column(group)
    change = [policy, *quality_columns(group)[1:], *map(column_of, _CHANGE_COLUMNS)]
    prediction = [policy, *map(column_of, _PREDICTION_COLUMNS)]
    cost = [policy, *map(column_of, _COST_COLUMNS)]
    changed = [result for result in shown if result.change is not None and not result.is_baseline]
    predicted = [result for result in shown if result.prediction is not None]
    with_cost = [result for result in shown if result.cost is not None]
    return {
        "best": best_table(group),
        "change": results_table(group, change, changed),
        "categories": category_table(group),
        "predicted": results_table(group, prediction, predicted),
        "traffic": results_table(group, cost, with_cost),
        "rounding": rounding_table(group),
    }


def best_table(group: Group) -> Table:
    """The fastest points where no loss was measured and within a small loss.

    No rows without a baseline, and where no point can be judged.
    """
    columns = [column_of("speedup"), *quality_columns(group), column_of("agreement_with_target")]
    if not group.relative or not group.judged:
        return Table([], [])
    rows = []
    scale = group.scale
    for title, loss in (
        ("no loss measured", 0.0),
        (f"{scale.loss_words} of loss", scale.small_loss),
    ):
        best = best_at_loss(group.judged, loss)
        if best is None:
            cells = [TableCell(MISSING)] * len(columns)
            policy_cell = TableCell(
                f"no point kept the quality of {group.setting.baseline} to {title}"
            )
        else:
            cells = [column.cell(best) for column in columns]
            cells[0] = replace(cells[0], tone="" if disturbance(best) else "big")
            policy_cell = TableCell(best.policy, group.knob_label(best))
        rows.append(TableRow([TableCell(title, tone="title"), *cells, policy_cell]))
    return Table([TableColumn("allowed"), *columns, TableColumn("policy, knobs")], rows)


def category_table(group: Group) -> Table:
    """A row for every category of the selected points, each category's fastest point first."""
    shown = [(result, categories_of(result)) for result in group.selected()]
    measured = [(result, categories) for result, categories in shown if not result.is_baseline]
    names = dict.fromkeys(name for _, categories in measured for name in categories)
    names.pop(OVERALL, None)
    policy = policy_column(group)
    rows = []
    for name in [*names, OVERALL]:
        for result, categories in measured:
            if name in categories:
                numbers = _category_cells(result, categories[name])
                rows.append(TableRow([TableCell(name, "", name), policy.cell(result), *numbers]))
    columns = [
        TableColumn("category", "The category of the dataset."),
        policy,
        *map(column_of, CATEGORY_COLUMNS),
    ]
    return Table(columns, rows)


def _category_cells(result: Result, category: Category) -> list[TableCell]:
    """The cells of `CATEGORY_COLUMNS`, with the baseline's tokens/s below the point's."""
    baseline_rate = category.baseline_tokens_per_s
    rate_detail = "" if baseline_rate is None else number(baseline_rate, 1)
    tokens_per_call = category.tokens_per_target_call
    return [
        number_cell(category.n_examples, 0),
        speedup_cell(category.speedup, result),
        TableCell(number(category.tokens_per_s, 1), rate_detail, category.tokens_per_s),
        number_cell(tokens_per_call),
        TableCell(percent(category.acceptance_rate, 1), "", category.acceptance_rate),
    ]


def rounding_table(group: Group) -> Table:
    """How much the rule and the rounding of each sampled point change the target's distribution,
    by number of rows.
    """
    certified = [
        result
        for result in group.results
        if result.certificate is not None and result.certificate.rounding
    ]
    counts = sorted({int(count) for result in certified for count in result.certificate.rounding})

    def rows_column(count: int) -> TableColumn:
        hint = (
            f"the largest total variation between a forward of {count} rows and one row after"
            " another"
        )

        def cell(result: Result) -> TableCell:
            return _variation(result.certificate.rounding.get(str(count)))

        return TableColumn(counted(count, "row"), hint, cell)

    change = COLUMNS["certificate_output"]
    rule = TableColumn("rule", change.explanation, lambda result: _variation(change.of(result)))
    return results_table(group, [policy_column(group), rule, *map(rows_column, counts)], certified)


def batch_table(curves: Sequence[BatchCurve]) -> Table:
    """What each policy did at every number of texts at once."""
    rows = []
    for curve in curves:
        if not all(point.clock_is_known for point in curve.points):
            break_even = "not known"
        elif curve.break_even is not None:
            break_even = number(curve.break_even, 1)
        else:
            break_even = f"none up to {curve.points[-1].setting.batch}"
        for result in curve.points:
            rows.append(
                {
                    "policy": curve.label,
                    "batch": TableCell(str(result.setting.batch), "", result.setting.batch),
                    "speedup": speedup_cell(result.speedup, result),
                    "tokens/s": number_cell(result.tokens_per_s, 0),
                    "baseline, tokens/s": number_cell(result.baseline_tokens_per_s, 0),
                    "median latency, ms": number_cell(1000 * result.latency_s.median, 0),
                    "p95, ms": number_cell(1000 * result.latency_s.p95, 0),
                    "break-even batch": break_even,
                }
            )
    return plain_table(rows)


def _variation(value: float | None) -> TableCell:
    """A total variation, of which the order of magnitude counts."""
    if value is None:
        return TableCell(MISSING)
    return TableCell("0" if value == 0 else f"{value:.1e}", order=value)
