"""A plain list of the runs in a folder of outputs: `outputs/index.html`, and the table of `scripts/sweeps.py list`."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from bild_lab.engine.models.ranks import launched
from bild_lab.files import write_atomically
from bild_lab.lab.analysis.statistics import ENOUGH_EXAMPLES
from bild_lab.lab.cli import console, escape
from bild_lab.lab.formatting import MISSING, interval, knob_value, short_name, times
from bild_lab.lab.results.progress import read_commands

PAGE = "index.html"
_TOO_FEW = "too few examples"


@dataclass(frozen=True)
class Run:
    """A folder with points.

    link: its page, or itself, below outputs. date: of its last new command, ISO. free: the fastest point that lost no
    quality, in words; cheap: the fastest that lost at most one point of it.
    """

    name: str
    link: str
    date: str = ""
    pair: str = ""
    data: str = ""
    points: int = 0
    free: str = ""
    cheap: str = ""
    command: str = ""

    def contains(self, words: Sequence[str]) -> bool:
        """Whether it has all of these words, in whatever case."""
        text = " ".join(map(str, vars(self).values())).lower()
        return all(word.lower() in text for word in words)


def update_index(outputs: Path) -> None:
    """Write `index.html`. A fault is printed in a line: what was measured does not depend on it."""
    if not launched().first:
        return
    try:
        write_index(outputs)
    except Exception as error:
        console.print(f"[bold]{PAGE} was not written[/bold]: {escape(f'{type(error).__name__}: {error}')}")


def write_index(outputs: Path) -> list[Run]:
    """Write `index.html` into outputs, whole or not at all. Returns its runs, the newest first.

    Everything that came from outside the package is escaped. Raises OSError if the page cannot be written.
    """
    from bild_lab.report.page.base import page_environment

    runs = read_runs(outputs)
    templates = page_environment()
    templates.filters["href"] = lambda path: quote(os.fsencode(path))
    text = templates.get_template("index.html.j2").render(runs=runs)
    write_atomically(outputs / PAGE, text.encode(errors="replace"))
    return runs


def read_runs(outputs: Path) -> list[Run]:
    """Every folder of outputs that has points or a report, the newest first."""
    folders = [one for one in outputs.iterdir() if (one / "points").is_dir() or (one / "report.html").is_file()]
    return sorted(map(_read_run, folders), key=lambda run: run.date, reverse=True)


def _read_run(folder: Path) -> Run:
    """A folder's line. One whose files cannot be read says so."""
    try:
        return _run(folder)
    except (OSError, ValueError, KeyError, csv.Error) as error:
        return Run(folder.name, f"{folder.name}/", free=f"cannot be read: {type(error).__name__}: {error}")


def _run(folder: Path) -> Run:
    """A folder's line. Its numbers are those of `sweep.csv`; a folder without that was not reported yet."""
    table, commands = folder / "sweep.csv", read_commands(folder)
    rows: list[dict[str, str]] = []
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    written = (table if rows else folder).stat().st_mtime
    points = {file.parent.name.partition(".")[0] for file in folder.glob("points/*/result.json")}
    return Run(
        name=folder.name,
        link=f"{folder.name}/{'report.html' if (folder / 'report.html').is_file() else ''}",
        date=commands[-1].started if commands else datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds"),
        pair=_several([_pair(row) for row in rows]),
        data=_several([f"{short_name(row['dataset'])} {row['split']}, {row['n_examples']} examples" for row in rows]),
        points=len(points - {""}),  # a folder that begins with a dot is unfinished
        free=_best(rows, 0.0),
        cheap=_best(rows, 1.0),
        command=commands[-1].line if commands else "",
    )


def _pair(row: Mapping[str, str]) -> str:
    return short_name(row["target"]) + (f" drafted by {short_name(row['draft'])}" if row["draft"] else "")


def _best(rows: Sequence[Mapping[str, str]], loss: float) -> str:
    """The fastest point of all settings that lost at most so many points of quality, with its interval."""
    drafted = [row for row in rows if row["speedup"] and row["quality_difference"]]
    enough = [row for row in drafted if int(row["n_examples"]) >= ENOUGH_EXAMPLES]
    kept = [row for row in enough if float(row["quality_difference"]) >= -loss - 1e-9]
    if not kept:
        return MISSING if enough or not drafted else _TOO_FEW
    best = max(kept, key=lambda row: float(row["speedup"]))
    bounds = interval(*(float(row) if row else None for row in (best["speedup_low"], best["speedup_high"])))
    return f"{_label(best, rows)} {times(float(best['speedup']))} {bounds}".strip()


def _label(row: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> str:
    """The policy with the knobs in which the point differs from others of its policy."""
    names = list(row)
    knobs = names[names.index("policy") + 1 : names.index("target")]
    peers = [one for one in rows if one["policy"] == row["policy"]]
    telling = [knob for knob in knobs if row[knob] and len({one[knob] for one in peers}) > 1]
    label = ", ".join(f"{knob} {_plain(row[knob])}" for knob in telling)
    return f"{row['policy']} ({label})" if label else row["policy"]


def _plain(value: str) -> str:
    """A knob's value; numbers without trailing zeros."""
    try:
        return knob_value(float(value))
    except ValueError:
        return value


def _several(words: Sequence[str]) -> str:
    different = list(dict.fromkeys(words))
    return "; ".join(different) if len(different) <= 2 else f"{different[0]} and {len(different) - 1} more"
