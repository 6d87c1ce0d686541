"""Two sweeps, A and B, compared: a table in the terminal, `compare.csv`, and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from bild_lab.files import write_atomically
from bild_lab.lab.metrics.quality import Difference
from bild_lab.lab.schema.formatting import (
    MISSING,
    counted,
    interval,
    knob_label,
    number,
    number_range,
    short_name,
    signed,
    times,
)
from bild_lab.lab.schema.numbers import SIGNIFICANT, Speedup, scale_of
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import ENOUGH_EXAMPLES
from bild_lab.lab.store.groups import telling_knobs
from bild_lab.lab.store.table import write_csv
from bild_lab.report.matching import identity_columns
from bild_lab.report.page.base import page_environment, plotly_js
from bild_lab.report.page.figures import comparison_figures
from bild_lab.report.paired_comparison import (
    NOT_COMPARED,
    SAME,
    TOO_FEW,
    MetricComparison,
    PointComparison,
)
from bild_lab.report.phrases import TIME_BATCHES_TWICE
from bild_lab.report.provenance import scored_differently, unreliable
from bild_lab.report.tables import TableCell, number_cell, plain_table
from bild_lab.report.terminal import latex_table, narrow_table, widen

DRIFT = 0.1  # of the baseline's latency, beyond which the machine, not the method, may have changed
# of verdicts, in `report.css`
_TONES = {"faster": "good", "better": "good", "slower": "bad", "worse": "bad"}
_STYLES = {"good": "green", "bad": "red"}  # and in the terminal
_LEGEND = (
    "latency B/A: B's total latency over A's on the same examples, each relative to its baseline's"
    " where that has the same code and setting; below 1 B is faster. Brackets: 95 % intervals,"
    f" paired by example. A quality differs where p < {SIGNIFICANT}, paired."
)
_BASELINE_LEGEND = (
    "baseline B/A: the same of the baselines timed beside them, which should be 1 where only the"
    " method changed."
)


def summary(compared: Sequence[PointComparison]) -> str:
    """Count the verdicts, and say how many would come by chance."""
    speed = _verdict_counts([comparison.speed_verdict for comparison in compared])
    quality = _verdict_counts([comparison.quality.verdict for comparison in compared])
    count = len(compared)
    verdicts = (
        f"{counted(count, 'point')} compared. B against A: {speed} in speed; {quality} in quality."
    )
    if count == 1:
        return verdicts
    by_chance = number(SIGNIFICANT * count, 1)
    return f"{verdicts} Of {count} points about {by_chance} would differ by chance alone."


def notes(
    compared: Sequence[PointComparison],
    differing: Mapping[str, tuple[str, str]],
    unmatched: Mapping[str, Sequence[Result]],
    reason: str,
) -> list[str]:
    """Return what a reader must know: what else differs, what was not compared, whether the machine
    drifted.

    differing: keys of the setting with the values of A and of B. unmatched: the results that only
    "A" or only "B" has. reason: why qualities could not be compared; empty if they could.
    """
    remarks = [f"{key}: A {a}, B {b}" for key, (a, b) in differing.items()]
    speed_reasons = Counter(comparison.not_compared_reason for comparison in compared)
    for speed_reason, count in speed_reasons.items():
        if speed_reason:
            which = "" if count == len(compared) else f" of {count} of {len(compared)} points"
            remarks.append(f"Latencies{which} are not compared: {speed_reason}.")
    if reason:
        remarks.append(f"Qualities are not compared, as the references cannot be read: {reason}")
    remarks += _drift(compared)
    results_a = [comparison.pair.a for comparison in compared]
    results_b = [comparison.pair.b for comparison in compared]
    remarks += [f"A: {remark}" for remark in unreliable(results_a)]
    remarks += [f"B: {remark}" for remark in unreliable(results_b)]
    pairs = zip(results_a, results_b, strict=True)
    remarks += dict.fromkeys(way for pair in pairs for way in scored_differently(pair))
    remarks += _missing_examples(compared)
    remarks += _without_verdicts(compared)
    for sweep, results in unmatched.items():
        if results:
            policies = ", ".join(dict.fromkeys(result.policy for result in results))
            remarks.append(f"Only {sweep} has {len(results)} more ({policies}).")
    return remarks


def _drift(compared: Sequence[PointComparison]) -> list[str]:
    """Whether the baseline itself was faster or slower in B."""
    ratios = [
        comparison.baseline_latency_ratio.value
        for comparison in compared
        if comparison.baseline_latency_ratio
    ]
    drifted = [ratio for ratio in ratios if abs(ratio - 1) > DRIFT]
    if not drifted:
        return []
    ends = number_range(drifted)
    return [
        f"The baseline itself took {ends} times as long in B at {len(drifted)} of {len(compared)}"
        " points. A latency that is not relative to it says little there, unless the baseline's code"
        " is what changed."
    ]


def _missing_examples(compared: Sequence[PointComparison]) -> list[str]:
    """Where A and B did not decode the same examples."""
    counts = dict.fromkeys(
        (comparison.n_examples, *comparison.n_decoded) for comparison in compared
    )
    return [
        f"Compared over the {n_shared} examples that both have: A decoded {n_a}, B {n_b}. Speedups"
        " and qualities are of these examples too."
        for n_shared, n_a, n_b in counts
        if not n_shared == n_a == n_b
    ]


def _without_verdicts(compared: Sequence[PointComparison]) -> list[str]:
    """Where no side is called faster or better, and why."""
    sentences = []
    if not all(comparison.enough_answered and comparison.quality.enough for comparison in compared):
        sentences.append(
            f"Below {ENOUGH_EXAMPLES} examples intervals are too narrow, so nothing is called"
            " faster, better or no worse there."
        )
    if not all(
        comparison.clock_is_known for comparison in compared if comparison.latency_ratio is not None
    ):
        sentences.append(
            "Texts of a batch share their clock, so nothing is called faster where nothing says how"
            f" far it is off: {TIME_BATCHES_TWICE}."
        )
    return sentences


def comparison_table(compared: Sequence[PointComparison]) -> Table:
    """Tabulate the comparison for the terminal, in A's order."""
    table = narrow_table()
    table.add_column("point", ratio=1, overflow="fold")
    for title in ("speedup\nA, B", "latency\nB/A", "speed", "quality\nA", "B minus A", "quality"):
        side = "left" if title in ("speed", "quality") else "right"
        table.add_column(title, justify=side, no_wrap=True)
    for comparison, point in zip(compared, _point_cells(compared), strict=True):
        speedup_a, speedup_b = comparison.speedups
        speed_cells = [
            point,
            TableCell(f"{number(speedup_a.value)}, {number(speedup_b.value)}"),
            _ratio_cell(comparison.latency_ratio),
            _verdict_cell(comparison.speed_verdict),
        ]
        for metric_comparison in comparison.metric_comparisons:
            if metric_comparison is comparison.quality:
                start = speed_cells
            else:
                start = [TableCell(f"  {metric_comparison.metric}"), *[TableCell("")] * 3]
            a, _, difference, verdict = _quality_cells(metric_comparison)
            table.add_row(*(_text(cell) for cell in (*start, a, difference, verdict)))
    table.caption = Text(_LEGEND, style="dim", justify="left")
    widen(table)
    return table


def comparison_frame(compared: Sequence[PointComparison]) -> pd.DataFrame:
    """One row per point: knobs under their own names, then the numbers of A and B, ratios,
    differences and verdicts.
    """
    return pd.DataFrame([_frame_row(comparison) for comparison in compared])


def _frame_row(comparison: PointComparison) -> dict[str, Any]:
    a, b = comparison.pair.a, comparison.pair.b
    row = {
        **identity_columns(a, comparison.pair.distinct),
        "point_a": a.point,
        "point_b": b.point,
        "compared_examples": comparison.n_examples,
        "examples_a": comparison.n_decoded[0],
        "examples_b": comparison.n_decoded[1],
        "speedup_a": comparison.speedups[0].value,
        "speedup_b": comparison.speedups[1].value,
        **_estimate_columns("latency_ratio", comparison.latency_ratio),
        **_estimate_columns("baseline_latency_ratio", comparison.baseline_latency_ratio),
        "speed": comparison.speed_verdict,
        "why_not_compared": comparison.not_compared_reason,
        "quality_metric": a.quality.metric,
        **_metric_columns("quality", comparison.quality, "p_value", "quality"),
    }
    for metric in comparison.metric_comparisons[1:]:
        name = metric.metric
        row |= _metric_columns(name, metric, f"{name}_p_value", f"{name}_verdict")
    return row


def _metric_columns(
    name: str, metric: MetricComparison, p_value_column: str, verdict_column: str
) -> dict[str, Any]:
    """The columns of a metric, most of which begin with its name."""
    difference = metric.difference
    return {
        f"{name}_a": metric.values[0],
        f"{name}_b": metric.values[1],
        **_estimate_columns(f"{name}_difference", difference),
        p_value_column: None if difference is None else difference.p_value,
        verdict_column: metric.verdict,
        **(metric.non_inferiority.to_columns() if metric.non_inferiority else {}),
    }


def _estimate_columns(name: str, estimate: Speedup | Difference | None) -> dict[str, float | None]:
    """An estimate with the ends of its interval; None where there is none."""
    return {
        name: None if estimate is None else estimate.value,
        f"{name}_low": None if estimate is None else estimate.low,
        f"{name}_high": None if estimate is None else estimate.high,
    }


def write_comparison(
    folder: Path,
    names: tuple[str, str],
    compared: Sequence[PointComparison],
    remarks: Sequence[str],
) -> None:
    """Write `compare.csv` and `compare.html`.

    Everything that came from outside the package is escaped.
    """
    write_csv(folder / "compare.csv", comparison_frame(compared))
    points = _point_cells(compared)
    page = page_environment().get_template("compare.html.j2")
    text = page.render(
        names=names,
        summary=summary(compared),
        notes=remarks,
        legend=f"{_LEGEND} {_BASELINE_LEGEND}",
        table=plain_table(_rows(compared)),
        figures=comparison_figures(compared, [f"{point.text} {point.detail}" for point in points]),
        plotly=plotly_js(),
    )
    write_atomically(folder / "compare.html", text.encode())


def latex_comparison(compared: Sequence[PointComparison], remarks: Sequence[str]) -> str:
    """The comparison as a table for a paper: both speedups, the ratio of latencies, and the
    difference in quality.
    """
    table = plain_table(_rows(compared))
    all_titles = [column.title for column in table.columns]
    difference = next(title for title in all_titles if title.endswith(", B minus A"))
    titles = ["point", "speedup A", "speedup B", "latency B/A", difference]
    return latex_table(table, titles, remarks)


def _rows(compared: Sequence[PointComparison]) -> list[dict[str, TableCell]]:
    """The cells of each point by their titles: its name, its speed, and its quality by every
    metric.
    """
    leading_metrics = {comparison.pair.a.quality.metric for comparison in compared}
    leading = "quality" if len(leading_metrics) > 1 else leading_metrics.pop()
    metrics = {leading: None}  # in their order
    for comparison in compared:
        metrics |= dict.fromkeys(metric.metric for metric in comparison.metric_comparisons[1:])
    rows = []
    for comparison, point in zip(compared, _point_cells(compared), strict=True):
        speedup_a, speedup_b = comparison.speedups
        row = {
            "point": point,
            "speedup A": _speedup_cell(speedup_a),
            "speedup B": _speedup_cell(speedup_b),
            "latency B/A": _ratio_cell(comparison.latency_ratio),
            "baseline B/A": _ratio_cell(comparison.baseline_latency_ratio),
            "speed": _verdict_cell(comparison.speed_verdict),
        }
        by_metric = {metric.metric: metric for metric in comparison.metric_comparisons[1:]}
        by_metric[leading] = comparison.quality
        for metric in metrics:
            titles = (f"{metric} A", f"{metric} B", f"{metric}, B minus A", f"{metric}, verdict")
            row |= dict(zip(titles, _quality_cells(by_metric.get(metric)), strict=True))
        rows.append(row)
    return rows


def _point_cells(compared: Sequence[PointComparison]) -> list[TableCell]:
    """The points' names, with the knobs and the values of the setting that tell each from others."""
    results = [comparison.pair.a for comparison in compared]
    telling, cells = telling_knobs(results), []
    for comparison, result in zip(compared, results, strict=True):
        words = [f"{key} {short_name(value)}" for key, value in comparison.pair.distinct.items()]
        knobs = knob_label(result, telling(result), among=results)
        cells.append(TableCell(result.policy, ", ".join(filter(None, [knobs, *words]))))
    return cells


def _speedup_cell(speedup: Speedup) -> TableCell:
    return TableCell(times(speedup.value), interval(speedup.low, speedup.high), speedup.value)


def _ratio_cell(ratio: Speedup | None) -> TableCell:
    if ratio is None:
        return TableCell(MISSING)
    return TableCell(number(ratio.value, 3), interval(ratio.low, ratio.high), ratio.value)


def _verdict_cell(verdict: str, detail: str = "") -> TableCell:
    return TableCell(verdict, detail, tone=_TONES.get(verdict, ""))


def _quality_cells(metric: MetricComparison | None) -> list[TableCell]:
    """A metric of A and of B, the difference, and the verdict with its p-value."""
    if metric is None:
        return [TableCell(MISSING)] * 4
    digits = scale_of(metric.metric).digits
    values = [number_cell(value, digits) for value in metric.values]
    difference = metric.difference
    if difference is None:
        return [*values, TableCell(MISSING), _verdict_cell(metric.verdict)]
    bounds = interval(difference.low, difference.high, digits, signed)
    change = TableCell(signed(difference.value, digits), bounds, difference.value)
    details = [f"p {number(difference.p_value, 3)}"]
    if metric.non_inferiority is not None:
        details.append(_no_worse_words(metric))
    return [*values, change, _verdict_cell(metric.verdict, "\n".join(details))]


def _no_worse_words(metric: MetricComparison) -> str:
    """Whether B is no worse than A by the margin that was tested, in lines as short as a column."""
    tested = metric.non_inferiority
    verdict = "no worse" if tested.shown and metric.enough else "not shown\nno worse"
    margin = scale_of(metric.metric).amount(tested.margin)
    rest = "\n" if " " in margin else " "  # a unit fills the column
    return f"{verdict}\nby {margin}:{rest}p {number(tested.p_value, 3)}"


def _text(cell: TableCell) -> Text:
    # a verdict of two words is written on two lines
    two_words = (SAME, NOT_COMPARED, TOO_FEW)
    text = cell.text.replace(" ", "\n") if cell.text in two_words else cell.text
    return Text("\n".join(filter(None, (text, cell.detail))), style=_STYLES.get(cell.tone, ""))


def _verdict_counts(verdicts: list[str]) -> str:
    if set(verdicts) == {NOT_COMPARED}:
        return NOT_COMPARED
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).most_common())
