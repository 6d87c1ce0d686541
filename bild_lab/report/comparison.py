"""Two sweeps or commits, A and B, compared: a table in the terminal, `compare.csv`, `compare.json`, and a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bild_lab.files import write_atomically
from bild_lab.lab.analysis.paired import NOT_COMPARED, SAME, SIGNIFICANT, Compared, ComparedQuality
from bild_lab.lab.analysis.statistics import Value, figures
from bild_lab.lab.formatting import MISSING, interval, knob_label, number, short_name, signed, signed_interval, times
from bild_lab.lab.results.groups import varying_knobs
from bild_lab.lab.schema.numbers import Speedup
from bild_lab.lab.schema.result import Result
from bild_lab.report.page.forest import forest
from bild_lab.report.page.tables import TableCell
from bild_lab.report.page.templates import page_environment
from bild_lab.report.provenance import unreliable
from bild_lab.report.terminal import WIDTH

DRIFT = 0.1  # of the baseline's latency, beyond which the machine, not the method, may have changed
_COLOURS = {"faster": "green", "better": "green", "slower": "red", "worse": "red"}
_LEGEND = (
    "latency B/A: B's total latency over A's on the same examples; below 1 B is faster. Brackets: 95 % intervals, "
    f"paired by example. A quality differs where p < {SIGNIFICANT}, paired."
)
_BASE = "baseline B/A: the same of the baselines timed beside them, which should be 1 where only the method changed."
_SPEED = ("A", "B", "latency B/A", "baseline B/A", "verdict")
_QUALITY = ("A", "B", "B minus A", "p", "verdict")


def summary(compared: Sequence[Compared]) -> str:
    """Count the verdicts, and say how many would come by chance."""
    speed = _counted([one.speed_verdict for one in compared])
    quality = _counted([one.quality_verdict for one in compared])
    count = len(compared)
    counted = f"{count} point{'' if count == 1 else 's'} compared. B against A: {speed} in speed; {quality} in quality."
    if count == 1:
        return counted
    return f"{counted} Of {count} points about {number(SIGNIFICANT * count, 1)} would differ by chance alone."


def notes(
    compared: Sequence[Compared],
    differing: Mapping[str, tuple[str, str]],
    alone: Mapping[str, Sequence[Result]],
    why: str,
) -> list[str]:
    """Return what a reader must know: what else differs, what was not compared, whether the machine drifted.

    alone: the results that only "A" or only "B" has. why: the reason if qualities could not be compared, else empty.
    """
    remarks = [f"{key}: A {a}, B {b}" for key, (a, b) in differing.items()]
    for unfit in dict.fromkeys(one.unfit for one in compared if one.unfit):
        remarks.append(f"Latencies are not compared: {unfit}.")
    if why:
        remarks.append(f"Qualities are not compared, as the references cannot be read: {why}")
    drifted = [one for one in compared if one.baseline_latency and abs(one.baseline_latency.value - 1) > DRIFT]
    if drifted:
        factors = [one.baseline_latency.value for one in drifted]
        remarks.append(
            f"The baseline itself took {number(min(factors))} to {number(max(factors))} times as long in B at "
            f"{len(drifted)} of {len(compared)} points: compare the speedups rather than the latencies, unless the "
            "baseline's code is what changed."
        )
    for name, results in (("A", [one.pair.a for one in compared]), ("B", [one.pair.b for one in compared])):
        remarks += [f"{name}: {remark}" for remark in unreliable(results)]
    for decoded in dict.fromkeys((one.n_examples, *one.decoded) for one in compared):
        if set(decoded) != {decoded[0]}:
            remarks.append(
                f"Compared over the {decoded[0]} examples that both have: A decoded {decoded[1]}, B {decoded[2]}. "
                "Speedups and qualities are of these examples too."
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
    for title in ("speedup\nA, B", "latency\nB/A", "speed", "quality A,\nB minus A", "quality"):
        table.add_column(title, justify="left" if title in ("speed", "quality") else "right", no_wrap=True)
    for one, (point, speed, qualities) in zip(compared, _rows(compared), strict=True):
        quality, both = qualities[0], TableCell(", ".join(number(speedup.value) for speedup in one.speedups))
        shown = (point, both, speed[2], speed[4], quality[0], quality[2], quality[4])
        table.add_row(*(_text(cell) for cell in shown))
        for further, cells in zip(one.further, qualities[1:], strict=False):
            table.add_row(f"  {further.metric}", "", "", "", *(_text(cells[place]) for place in (0, 2, 4)))
    table.caption = Text(_LEGEND, style="dim", justify="left")
    return table


def serving_table(engine: str, compared: Sequence[Compared]) -> Table:
    """Tabulate the acceptance of both sides under an engine's names, over all examples of each side."""
    title = f"acceptance as {engine} names it"
    table = Table(box=SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=(0, 1), title=title, title_justify="left")
    table.add_column("point", ratio=1, overflow="fold")
    table.add_column("figure")
    for side in ("A", "B"):
        table.add_column(side, justify="right", overflow="fold")
    for one, (point, _, _) in zip(compared, _rows(compared), strict=True):
        a, b = (figures(side, engine) for side in (one.pair.a, one.pair.b))
        for place, name in enumerate(a):
            table.add_row(_text(point) if place == 0 else "", name, _figure(a[name]), _figure(b[name]))
    return table


def _figure(value: Value) -> str:
    """A figure of one or of several positions; a dash if it is not known."""
    if isinstance(value, list):
        return " ".join(number(each, 3) for each in value)
    return number(value, 0 if isinstance(value, int) else 3)


def comparison_frame(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row per point: knobs under their own names, then the numbers of A and B, ratios, differences and verdicts."""
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
            "quality_a": one.qualities[0],
            "quality_b": one.qualities[1],
            **_estimate("quality_difference", one.quality),
            "p_value": None if one.quality is None else one.quality.p_value,
            "quality": one.quality_verdict,
            **{name: value for further in one.further for name, value in _columns(further).items()},
        }
        for one in compared
    ]
    return pd.DataFrame(rows)


def _columns(one: ComparedQuality) -> dict[str, Any]:
    """The columns of a metric behind the leading one."""
    return {
        f"{one.metric}_a": one.values[0],
        f"{one.metric}_b": one.values[1],
        **_estimate(f"{one.metric}_difference", one.difference),
        f"{one.metric}_p_value": None if one.difference is None else one.difference.p_value,
        f"{one.metric}_verdict": one.verdict,
    }


def write_comparison(
    folder: Path, names: tuple[str, str], compared: Sequence[Compared], remarks: Sequence[str]
) -> None:
    """Write `compare.csv`, `compare.json` (what the lab book says) and `compare.html`.

    Everything that came from outside the package is escaped.
    """
    rows, said = _rows(compared), summary(compared)
    about = {"names": names, "summary": said, "notes": remarks, "compared": datetime.now(UTC).isoformat()}
    write_atomically(folder / "compare.csv", comparison_frame(compared).to_csv(index=False).encode())
    write_atomically(folder / "compare.json", json.dumps(about, indent=2, ensure_ascii=False).encode())
    page = page_environment().get_template("compare.html.j2")
    text = page.render(
        names=names,
        summary=said,
        notes=remarks,
        legend=f"{_LEGEND} {_BASE}",
        speed=_SPEED,
        metrics=_metrics(compared),
        quality=_QUALITY,
        rows=rows,
        forest=forest(compared, [" ".join(filter(None, (point.text, point.detail))) for point, _, _ in rows]),
    )
    write_atomically(folder / "compare.html", text.encode())


def _rows(compared: Sequence[Compared]) -> list[tuple[TableCell, list[TableCell], list[list[TableCell]]]]:
    """The cells of each point: its name, its speed, and its quality by every metric.

    Knobs that a policy's points share are left out.
    """
    metrics = len(_metrics(compared))
    return [_row(one, _distinguishing([other.pair.a for other in compared], one.pair.a), metrics) for one in compared]


def _metrics(compared: Sequence[Compared]) -> list[str]:
    """The metrics as shown, the leading one first."""
    lead = {one.pair.a.quality.metric for one in compared}
    further = dict.fromkeys(each.metric for one in compared for each in one.further)
    return ["quality" if len(lead) > 1 else lead.pop(), *further]


def _distinguishing(results: Sequence[Result], own: Result) -> list[str]:
    peers = [result for result in results if result.policy == own.policy]
    return [knob for knob in varying_knobs(peers) if knob in own.knobs] if len(peers) > 1 else list(own.knobs)


def _row(one: Compared, knobs: list[str], metrics: int) -> tuple[TableCell, list[TableCell], list[list[TableCell]]]:
    latency, base = one.latency, one.baseline_latency
    setting = ", ".join(f"{key} {short_name(value)}" for key, value in one.pair.distinct.items())
    point = TableCell(one.pair.a.policy, ", ".join(filter(None, (knob_label(one.pair.a, knobs), setting))))
    speed = [
        *(TableCell(times(each.value), _bounds(each)) for each in one.speedups),
        TableCell(MISSING) if latency is None else TableCell(number(latency.value, 3), _bounds(latency)),
        TableCell(MISSING) if base is None else TableCell(number(base.value, 3), _bounds(base)),
        TableCell(one.speed_verdict),
    ]
    qualities = [_quality(each) for each in one.judged]
    return point, speed, qualities + [[TableCell(MISSING)] * len(_QUALITY)] * (metrics - len(qualities))


def _quality(one: ComparedQuality) -> list[TableCell]:
    found = one.difference
    return [
        *(TableCell(number(value)) for value in one.values),
        TableCell(MISSING) if found is None else TableCell(signed(found.value), signed_interval(found.low, found.high)),
        TableCell(MISSING if found is None else number(found.p_value, 3)),
        TableCell(one.verdict),
    ]


def _text(cell: TableCell) -> Text:
    # a verdict of two words is written on two lines
    lines = cell.text.replace(" ", "\n") if cell.text in (SAME, NOT_COMPARED) else f"{cell.text}\n{cell.detail}".strip()
    return Text(lines, style=_COLOURS.get(cell.text, ""))


def _bounds(ratio: Speedup) -> str:
    return interval(ratio.low, ratio.high)


def _estimate(name: str, found: Any) -> dict[str, float | None]:
    parts = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    return {column: None if found is None else getattr(found, part) for column, part in parts.items()}


def _counted(verdicts: list[str]) -> str:
    if set(verdicts) == {NOT_COMPARED}:
        return NOT_COMPARED
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).most_common())
