"""Two sweeps, A and B, compared: a table in the terminal, `compare.csv`, and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bild_lab.files import write_atomically
from bild_lab.lab.schema.formatting import (
    MISSING,
    counted,
    interval,
    knob_label,
    number,
    short_name,
    signed,
    times,
)
from bild_lab.lab.schema.numbers import Speedup
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import telling_knobs
from bild_lab.report.page.base import page_environment, plotly_js
from bild_lab.report.page.figures import comparison_figures
from bild_lab.report.paired_comparison import (
    NOT_COMPARED,
    SAME,
    SIGNIFICANT,
    MetricComparison,
    PointComparison,
)
from bild_lab.report.provenance import unreliable
from bild_lab.report.tables import TableCell, plain_table
from bild_lab.report.terminal import WIDTH, latex_table

DRIFT = 0.1  # of the baseline's latency, beyond which the machine, not the method, may have changed
# of verdicts, in `report.css`
_TONES = {"faster": "good", "better": "good", "slower": "bad", "worse": "bad"}
_STYLES = {"good": "green", "bad": "red"}  # and in the terminal
_LEGEND = (
    "latency B/A: B's total latency over A's on the same examples, each relative to its baseline's"
    " where that has the same code and setting; below 1 B is faster. Brackets: 95 % intervals,"
    f" paired by example. A quality differs where p < {SIGNIFICANT}, paired."
)
_BASE = (
    "baseline B/A: the same of the baselines timed beside them, which should be 1 where only the"
    " method changed."
)


def summary(compared: Sequence[PointComparison]) -> str:
    """Count the verdicts, and say how many would come by chance."""
    speed = _counted([comparison.speed_verdict for comparison in compared])
    quality = _counted([comparison.quality.verdict for comparison in compared])
    count = len(compared)
    said = (
        f"{counted(count, 'point')} compared. B against A: {speed} in speed; {quality} in quality."
    )
    if count == 1:
        return said
    return (
        f"{said} Of {count} points about {number(SIGNIFICANT * count, 1)} would differ by chance"
        " alone."
    )


def notes(
    compared: Sequence[PointComparison],
    differing: Mapping[str, tuple[str, str]],
    alone: Mapping[str, Sequence[Result]],
    why: str,
) -> list[str]:
    """Return what a reader must know: what else differs, what was not compared, whether the machine
    drifted.

    alone: the results that only "A" or only "B" has. why: the reason if qualities could not be
    compared, else empty.
    """
    remarks = [f"{key}: A {a}, B {b}" for key, (a, b) in differing.items()]
    for unfit in dict.fromkeys(
        comparison.not_compared_reason for comparison in compared if comparison.not_compared_reason
    ):
        remarks.append(f"Latencies are not compared: {unfit}.")
    if why:
        remarks.append(f"Qualities are not compared, as the references cannot be read: {why}")
    drifted = [
        comparison
        for comparison in compared
        if comparison.baseline_latency_ratio
        and abs(comparison.baseline_latency_ratio.value - 1) > DRIFT
    ]
    if drifted:
        factors = [comparison.baseline_latency_ratio.value for comparison in drifted]
        remarks.append(
            f"The baseline itself took {number(min(factors))} to {number(max(factors))} times as"
            f" long in B at {len(drifted)} of {len(compared)} points. A latency that is not"
            " relative to it says little there, unless the baseline's code is what changed."
        )
    for name, results in (
        ("A", [comparison.pair.a for comparison in compared]),
        ("B", [comparison.pair.b for comparison in compared]),
    ):
        remarks += [f"{name}: {remark}" for remark in unreliable(results)]
    for decoded in dict.fromkeys(
        (comparison.n_examples, *comparison.n_decoded) for comparison in compared
    ):
        if set(decoded) != {decoded[0]}:
            remarks.append(
                f"Compared over the {decoded[0]} examples that both have: A decoded {decoded[1]}, B"
                f" {decoded[2]}. Speedups and qualities are of these examples too."
            )
    for name, results in alone.items():
        if results:
            policies = ", ".join(dict.fromkeys(result.policy for result in results))
            remarks.append(f"Only {name} has {len(results)} more ({policies}).")
    return remarks


def comparison_table(compared: Sequence[PointComparison]) -> Table:
    """Tabulate the comparison for the terminal, in A's order."""
    table = Table(box=SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=0, caption_justify="left")
    table.add_column("point", ratio=1, overflow="fold")
    for title in ("speedup\nA, B", "latency\nB/A", "speed", "quality\nA", "B minus A", "quality"):
        table.add_column(
            title, justify="left" if title in ("speed", "quality") else "right", no_wrap=True
        )
    for comparison in compared:
        both = TableCell(", ".join(number(speedup.value) for speedup in comparison.speedups))
        speed = [
            _point(comparison, compared),
            both,
            _ratio(comparison.latency_ratio),
            _verdict(comparison.speed_verdict),
        ]
        for place, metric_comparison in enumerate(comparison.metric_comparisons):
            a, _, difference, verdict = _quality(metric_comparison)
            leading_cells = (
                speed
                if place == 0
                else [TableCell(f"  {metric_comparison.metric}"), *[TableCell("")] * 3]
            )
            table.add_row(*(_text(cell) for cell in (*leading_cells, a, difference, verdict)))
    table.caption = Text(_LEGEND, style="dim", justify="left")
    return table


def comparison_frame(compared: Sequence[PointComparison]) -> pd.DataFrame:
    """One row per point: knobs under their own names, then the numbers of A and B, ratios,
    differences and verdicts.
    """
    rows = [
        {
            "policy": comparison.pair.a.policy,
            **comparison.pair.a.knobs,
            **comparison.pair.distinct,
            "point_a": comparison.pair.a.point,
            "point_b": comparison.pair.b.point,
            "compared_examples": comparison.n_examples,
            "examples_a": comparison.n_decoded[0],
            "examples_b": comparison.n_decoded[1],
            "speedup_a": comparison.speedups[0].value,
            "speedup_b": comparison.speedups[1].value,
            **_estimate("latency_ratio", comparison.latency_ratio),
            **_estimate("baseline_latency_ratio", comparison.baseline_latency_ratio),
            "speed": comparison.speed_verdict,
            "why_not_compared": comparison.not_compared_reason,
            "quality_metric": comparison.pair.a.quality.metric,
            **_columns("quality", comparison.quality, "p_value", "quality"),
            **{
                name: value
                for further in comparison.metric_comparisons[1:]
                for name, value in _columns(further.metric, further).items()
            },
        }
        for comparison in compared
    ]
    return pd.DataFrame(rows)


def _columns(
    name: str, quality: MetricComparison, p_value: str = "", verdict: str = ""
) -> dict[str, Any]:
    """The columns of a metric. p_value, verdict: names of two of them, if they do not begin with
    the metric's.
    """
    return {
        f"{name}_a": quality.values[0],
        f"{name}_b": quality.values[1],
        **_estimate(f"{name}_difference", quality.difference),
        p_value or f"{name}_p_value": None
        if quality.difference is None
        else quality.difference.p_value,
        verdict or f"{name}_verdict": quality.verdict,
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
    write_atomically(
        folder / "compare.csv", comparison_frame(compared).to_csv(index=False).encode()
    )
    points = [_point(comparison, compared) for comparison in compared]
    page = page_environment().get_template("compare.html.j2")
    text = page.render(
        names=names,
        summary=summary(compared),
        notes=remarks,
        legend=f"{_LEGEND} {_BASE}",
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
    titles = [column.title for column in table.columns]
    difference = next(title for title in titles if title.endswith(", B minus A"))
    return latex_table(
        table, ["point", "speedup A", "speedup B", "latency B/A", difference], remarks
    )


def _rows(compared: Sequence[PointComparison]) -> list[dict[str, TableCell]]:
    """The cells of each point by their titles: its name, its speed, and its quality by every
    metric.
    """
    lead = {comparison.pair.a.quality.metric for comparison in compared}
    metrics = ["quality" if len(lead) > 1 else lead.pop()]
    metrics += dict.fromkeys(
        further.metric for comparison in compared for further in comparison.metric_comparisons[1:]
    )
    rows = []
    for comparison in compared:
        a, b = (
            TableCell(times(speedup.value), interval(speedup.low, speedup.high))
            for speedup in comparison.speedups
        )
        row = {"point": _point(comparison, compared), "speedup A": a, "speedup B": b}
        row |= {
            "latency B/A": _ratio(comparison.latency_ratio),
            "baseline B/A": _ratio(comparison.baseline_latency_ratio),
        }
        row |= {"speed": _verdict(comparison.speed_verdict)}
        judged = dict(
            zip(
                (metrics[0], *(further.metric for further in comparison.metric_comparisons[1:])),
                comparison.metric_comparisons,
                strict=True,
            )
        )
        for metric in metrics:
            titles = (f"{metric} A", f"{metric} B", f"{metric}, B minus A", f"{metric}, verdict")
            row |= dict(zip(titles, _quality(judged.get(metric)), strict=True))
        rows.append(row)
    return rows


def _point(comparison: PointComparison, compared: Sequence[PointComparison]) -> TableCell:
    """A point's name, with the knobs that tell it from others."""
    result = comparison.pair.a
    knobs = telling_knobs(result, [comparison_of_sweep.pair.a for comparison_of_sweep in compared])
    setting = ", ".join(
        f"{key} {short_name(value)}" for key, value in comparison.pair.distinct.items()
    )
    return TableCell(result.policy, ", ".join(filter(None, (knob_label(result, knobs), setting))))


def _ratio(ratio: Speedup | None) -> TableCell:
    if ratio is None:
        return TableCell(MISSING)
    return TableCell(number(ratio.value, 3), interval(ratio.low, ratio.high), ratio.value)


def _verdict(verdict: str, detail: str = "") -> TableCell:
    return TableCell(verdict, detail, tone=_TONES.get(verdict, ""))


def _quality(quality: MetricComparison | None) -> list[TableCell]:
    """A metric of A and of B, the difference, and the verdict with its p-value."""
    if quality is None:
        return [TableCell(MISSING)] * 4
    difference, change = quality.difference, TableCell(MISSING)
    if difference is not None:
        change = TableCell(
            signed(difference.value),
            interval(difference.low, difference.high, write=signed),
            difference.value,
        )
    p_value = "" if difference is None else f"p {number(difference.p_value, 3)}"
    return [
        *(TableCell(number(value)) for value in quality.values),
        change,
        _verdict(quality.verdict, p_value),
    ]


def _text(cell: TableCell) -> Text:
    # a verdict of two words is written on two lines
    text = cell.text.replace(" ", "\n") if cell.text in (SAME, NOT_COMPARED) else cell.text
    return Text("\n".join(filter(None, (text, cell.detail))), style=_STYLES.get(cell.tone, ""))


def _estimate(name: str, estimate: Any) -> dict[str, float | None]:
    parts = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    return {
        column: None if estimate is None else getattr(estimate, attribute)
        for column, attribute in parts.items()
    }


def _counted(verdicts: list[str]) -> str:
    if set(verdicts) == {NOT_COMPARED}:
        return NOT_COMPARED
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).most_common())
