"""Two sides of a comparison: a table in the terminal, `compare.csv`, and a page."""

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
from bild_lab.lab.analysis.paired import NOT_COMPARED, SAME, SIGNIFICANT, Compared
from bild_lab.lab.analysis.statistics import Speedup
from bild_lab.report.formatting import MISSING, interval, knob_label, number, short_name, signed, signed_interval, times
from bild_lab.report.page.html import page_environment
from bild_lab.report.page.tables import Cell
from bild_lab.report.terminal import WIDTH

DRIFT = 0.1  # of the baseline's latency, beyond which the machine, not the method, may have changed
_COLOURS = {"faster": "green", "better": "green", "slower": "red", "worse": "red"}
_LEGEND = (
    "latency B/A: B's total latency over A's on the same examples; below 1 B is faster. Brackets: 95 % intervals, "
    f"paired by example. A quality differs where p < {SIGNIFICANT}, paired."
)
_BASE = "baseline B/A: the same of the baselines timed beside them, which should be 1 where only the method changed."
TITLES = "policy|knobs|speedup A|speedup B|latency B/A|baseline B/A|speed|A|B minus A|p|quality".split("|")


def summary(compared: Sequence[Compared]) -> str:
    """Count the verdicts, and say how many would come by chance."""
    speed = _counted([one.speed_verdict for one in compared])
    quality = _counted([one.quality_verdict for one in compared])
    count = len(compared)
    told = f"{count} point{'' if count == 1 else 's'} compared. B against A: {speed} in speed; {quality} in quality."
    if count == 1:
        return told
    return f"{told} Of {count} points about {number(SIGNIFICANT * count, 1)} would differ by chance alone."


def notes(
    compared: Sequence[Compared],
    differing: Mapping[str, tuple[str, str]],
    alone: Mapping[str, Sequence[dict]],
    why: str,
) -> list[str]:
    """What a reader must know: what else differs, what was not compared, and whether the machine drifted.

    alone: the results that only "A" or only "B" has. why: qualities could not be compared.
    """
    said = [f"{key}: A {a}, B {b}" for key, (a, b) in differing.items()]
    for unfit in dict.fromkeys(one.unfit for one in compared if one.unfit):
        said.append(f"Latencies are not compared: {unfit}.")
    if why:
        said.append(f"Qualities are not compared, as the references cannot be read: {why}")
    drifted = [one for one in compared if one.baseline_latency and abs(one.baseline_latency.value - 1) > DRIFT]
    if drifted:
        factors = [one.baseline_latency.value for one in drifted]
        said.append(
            f"The baseline itself took {number(min(factors))} to {number(max(factors))} times as long in B at "
            f"{len(drifted)} of {len(compared)} points: compare the speedups rather than the latencies, unless the "
            "baseline's code is what changed."
        )
    for side, results in alone.items():
        if results:
            names = ", ".join(dict.fromkeys(result["policy"] for result in results))
            said.append(f"Only {side} has {len(results)} more ({names}).")
    return said


def comparison_table(compared: Sequence[Compared]) -> Table:
    """Tabulate the comparison for the terminal, in A's order."""
    table = Table(box=SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column("point", ratio=1, overflow="fold")
    for title in ("speedup\nA, B", "latency\nB/A", "speed", "quality\nA", "quality\nB minus A", "quality"):
        table.add_column(title, justify="left" if title in ("speed", "quality") else "right", no_wrap=True)
    for one, row in zip(compared, _rows(compared), strict=True):
        knobs = " ".join(filter(None, (row["knobs"].text, row["knobs"].detail)))
        cells = {**row, "policy": Cell(row["policy"].text, knobs)}
        cells["speedup A"] = Cell(f"{number(one.pair.a['speedup']['value'])}, {number(one.pair.b['speedup']['value'])}")
        shown = ("policy", "speedup A", "latency B/A", "speed", "A", "B minus A", "quality")
        table.add_row(*(_text(cells[title]) for title in shown))
    table.caption = Text(_LEGEND, style="dim", justify="left")
    return table


def comparison_frame(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row per point: knobs under their own names, then both sides' numbers, ratios, differences and verdicts."""
    rows = [
        {
            "policy": one.pair.a["policy"],
            **one.pair.a["knobs"],
            **one.pair.place,
            "point_a": one.pair.a["point"],
            "point_b": one.pair.b["point"],
            "compared_examples": one.n_examples,
            "speedup_a": one.pair.a["speedup"]["value"],
            "speedup_b": one.pair.b["speedup"]["value"],
            **_estimate("latency_ratio", one.latency),
            **_estimate("baseline_latency_ratio", one.baseline_latency),
            "speed": one.speed_verdict,
            "why_not_compared": one.unfit,
            "quality_metric": one.pair.a["quality"]["metric"],
            "quality_a": one.pair.a["quality"]["value"],
            "quality_b": one.pair.b["quality"]["value"],
            **_estimate("quality_difference", one.quality),
            "p_value": None if one.quality is None else one.quality.p_value,
            "quality": one.quality_verdict,
        }
        for one in compared
    ]
    return pd.DataFrame(rows)


def write_comparison(folder: Path, names: tuple[str, str], compared: Sequence[Compared], said: Sequence[str]) -> None:
    """Write `compare.csv` and `compare.html`. Everything that came from outside the package is escaped."""
    write_atomically(folder / "compare.csv", comparison_frame(compared).to_csv(index=False).encode())
    text = (
        page_environment()
        .get_template("compare.html.j2")
        .render(
            names=names,
            summary=summary(compared),
            notes=said,
            legend=f"{_LEGEND} {_BASE}",
            titles=TITLES,
            rows=[[(cell, cell.text in _COLOURS) for cell in row.values()] for row in _rows(compared)],
        )
    )
    write_atomically(folder / "compare.html", text.encode())


def _rows(compared: Sequence[Compared]) -> list[dict[str, Cell]]:
    """The cells of each point by their titles; of the knobs only those that tell a policy's points apart."""
    return [_row(one, _telling([other.pair.a for other in compared], one.pair.a)) for one in compared]


def _telling(results: list[dict], own: dict) -> list[str]:
    peers = [result["knobs"] for result in results if result["policy"] == own["policy"]]
    varying = [knob for knob in own["knobs"] if len({str(knobs.get(knob)) for knobs in peers}) > 1]
    return varying if len(peers) > 1 else list(own["knobs"])


def _row(one: Compared, knobs: list[str]) -> dict[str, Cell]:
    a, b, quality = one.pair.a, one.pair.b, one.quality
    place = ", ".join(f"{key} {short_name(value)}" for key, value in one.pair.place.items())
    latency, base = one.latency, one.baseline_latency
    cells = (
        Cell(a["policy"]),
        Cell(knob_label(a, knobs), place),
        Cell(times(a["speedup"]["value"])),
        Cell(times(b["speedup"]["value"])),
        Cell(MISSING) if latency is None else Cell(number(latency.value, 3), _bounds(latency)),
        Cell(MISSING) if base is None else Cell(number(base.value, 3), _bounds(base)),
        Cell(one.speed_verdict),
        Cell(number(a["quality"]["value"]), a["quality"]["metric"]),
        Cell(MISSING) if quality is None else Cell(signed(quality.value), signed_interval(quality.low, quality.high)),
        Cell(MISSING if quality is None else number(quality.p_value, 3)),
        Cell(one.quality_verdict),
    )
    return dict(zip(TITLES, cells, strict=True))


def _text(cell: Cell) -> Text:
    # a verdict of two words stands on two lines
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
