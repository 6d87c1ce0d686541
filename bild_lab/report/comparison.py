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
from bild_lab.report.page.tables import TableCell, plain_table
from bild_lab.report.paired_comparison import (
    NOT_COMPARED,
    SAME,
    SIGNIFICANT,
    Compared,
    ComparedQuality,
)
from bild_lab.report.provenance import unreliable
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


def summary(compared: Sequence[Compared]) -> str:
    """Count the verdicts, and say how many would come by chance."""
    speed = _counted([one.speed_verdict for one in compared])
    quality = _counted([one.quality.verdict for one in compared])
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
    compared: Sequence[Compared],
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
    for unfit in dict.fromkeys(one.unfit for one in compared if one.unfit):
        remarks.append(f"Latencies are not compared: {unfit}.")
    if why:
        remarks.append(f"Qualities are not compared, as the references cannot be read: {why}")
    drifted = [
        one
        for one in compared
        if one.baseline_latency and abs(one.baseline_latency.value - 1) > DRIFT
    ]
    if drifted:
        factors = [one.baseline_latency.value for one in drifted]
        remarks.append(
            f"The baseline itself took {number(min(factors))} to {number(max(factors))} times as"
            f" long in B at {len(drifted)} of {len(compared)} points. A latency that is not"
            " relative to it says little there, unless the baseline's code is what changed."
        )
    for name, results in (
        ("A", [one.pair.a for one in compared]),
        ("B", [one.pair.b for one in compared]),
    ):
        remarks += [f"{name}: {remark}" for remark in unreliable(results)]
    for decoded in dict.fromkeys((one.n_examples, *one.decoded) for one in compared):
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


def comparison_table(compared: Sequence[Compared]) -> Table:
    """Tabulate the comparison for the terminal, in A's order."""
    table = Table(box=SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=0, caption_justify="left")
    table.add_column("point", ratio=1, overflow="fold")
    for title in ("speedup\nA, B", "latency\nB/A", "speed", "quality\nA", "B minus A", "quality"):
        table.add_column(
            title, justify="left" if title in ("speed", "quality") else "right", no_wrap=True
        )
    for one in compared:
        both = TableCell(", ".join(number(speedup.value) for speedup in one.speedups))
        speed = [_point(one, compared), both, _ratio(one.latency), _verdict(one.speed_verdict)]
        for place, each in enumerate(one.judged):
            a, _, difference, verdict = _quality(each)
            first = speed if place == 0 else [TableCell(f"  {each.metric}"), *[TableCell("")] * 3]
            table.add_row(*(_text(cell) for cell in (*first, a, difference, verdict)))
    table.caption = Text(_LEGEND, style="dim", justify="left")
    return table


def comparison_frame(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row per point: knobs under their own names, then the numbers of A and B, ratios,
    differences and verdicts.
    """
    rows = [
        {
            "policy": one.pair.a.policy,
            **one.pair.a.knobs,
            **one.pair.distinct,
            "point_a": one.pair.a.point,
            "point_b": one.pair.b.point,
            "compared_examples": one.n_examples,
            "examples_a": one.decoded[0],
            "examples_b": one.decoded[1],
            "speedup_a": one.speedups[0].value,
            "speedup_b": one.speedups[1].value,
            **_estimate("latency_ratio", one.latency),
            **_estimate("baseline_latency_ratio", one.baseline_latency),
            "speed": one.speed_verdict,
            "why_not_compared": one.unfit,
            "quality_metric": one.pair.a.quality.metric,
            **_columns("quality", one.quality, "p_value", "quality"),
            **{
                name: value
                for each in one.judged[1:]
                for name, value in _columns(each.metric, each).items()
            },
        }
        for one in compared
    ]
    return pd.DataFrame(rows)


def _columns(
    name: str, one: ComparedQuality, p_value: str = "", verdict: str = ""
) -> dict[str, Any]:
    """The columns of a metric. p_value, verdict: names of two of them, if they do not begin with
    the metric's.
    """
    return {
        f"{name}_a": one.values[0],
        f"{name}_b": one.values[1],
        **_estimate(f"{name}_difference", one.difference),
        p_value or f"{name}_p_value": None if one.difference is None else one.difference.p_value,
        verdict or f"{name}_verdict": one.verdict,
    }


def write_comparison(
    folder: Path, names: tuple[str, str], compared: Sequence[Compared], remarks: Sequence[str]
) -> None:
    """Write `compare.csv` and `compare.html`.

    Everything that came from outside the package is escaped.
    """
    write_atomically(
        folder / "compare.csv", comparison_frame(compared).to_csv(index=False).encode()
    )
    points = [_point(one, compared) for one in compared]
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


def latex_comparison(compared: Sequence[Compared], remarks: Sequence[str]) -> str:
    """The comparison as a table for a paper: both speedups, the ratio of latencies, and the
    difference in quality.
    """
    table = plain_table(_rows(compared))
    titles = [column.title for column in table.columns]
    difference = next(title for title in titles if title.endswith(", B minus A"))
    return latex_table(
        table, ["point", "speedup A", "speedup B", "latency B/A", difference], remarks
    )


def _rows(compared: Sequence[Compared]) -> list[dict[str, TableCell]]:
    """The cells of each point by their titles: its name, its speed, and its quality by every
    metric.
    """
    lead = {one.pair.a.quality.metric for one in compared}
    metrics = ["quality" if len(lead) > 1 else lead.pop()]
    metrics += dict.fromkeys(each.metric for one in compared for each in one.judged[1:])
    rows = []
    for one in compared:
        a, b = (
            TableCell(times(each.value), interval(each.low, each.high)) for each in one.speedups
        )
        row = {"point": _point(one, compared), "speedup A": a, "speedup B": b}
        row |= {"latency B/A": _ratio(one.latency), "baseline B/A": _ratio(one.baseline_latency)}
        row |= {"speed": _verdict(one.speed_verdict)}
        judged = dict(
            zip((metrics[0], *(each.metric for each in one.judged[1:])), one.judged, strict=True)
        )
        for metric in metrics:
            titles = (f"{metric} A", f"{metric} B", f"{metric}, B minus A", f"{metric}, verdict")
            row |= dict(zip(titles, _quality(judged.get(metric)), strict=True))
        rows.append(row)
    return rows


def _point(one: Compared, compared: Sequence[Compared]) -> TableCell:
    """A point's name, with the knobs that tell it from others."""
    own = one.pair.a
    knobs = telling_knobs(own, [other.pair.a for other in compared])
    setting = ", ".join(f"{key} {short_name(value)}" for key, value in one.pair.distinct.items())
    return TableCell(own.policy, ", ".join(filter(None, (knob_label(own, knobs), setting))))


def _ratio(ratio: Speedup | None) -> TableCell:
    if ratio is None:
        return TableCell(MISSING)
    return TableCell(number(ratio.value, 3), interval(ratio.low, ratio.high), ratio.value)


def _verdict(verdict: str, detail: str = "") -> TableCell:
    return TableCell(verdict, detail, tone=_TONES.get(verdict, ""))


def _quality(one: ComparedQuality | None) -> list[TableCell]:
    """A metric of A and of B, the difference, and the verdict with its p-value."""
    if one is None:
        return [TableCell(MISSING)] * 4
    found, change = one.difference, TableCell(MISSING)
    if found is not None:
        change = TableCell(
            signed(found.value), interval(found.low, found.high, write=signed), found.value
        )
    p_value = "" if found is None else f"p {number(found.p_value, 3)}"
    return [
        *(TableCell(number(value)) for value in one.values),
        change,
        _verdict(one.verdict, p_value),
    ]


def _text(cell: TableCell) -> Text:
    # a verdict of two words is written on two lines
    text = cell.text.replace(" ", "\n") if cell.text in (SAME, NOT_COMPARED) else cell.text
    return Text("\n".join(filter(None, (text, cell.detail))), style=_STYLES.get(cell.tone, ""))


def _estimate(name: str, found: Any) -> dict[str, float | None]:
    parts = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    return {
        column: None if found is None else getattr(found, part) for column, part in parts.items()
    }


def _counted(verdicts: list[str]) -> str:
    if set(verdicts) == {NOT_COMPARED}:
        return NOT_COMPARED
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).most_common())
