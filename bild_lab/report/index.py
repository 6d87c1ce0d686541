"""A plain list of the runs in a folder of outputs:

`outputs/index.html`, and the table of `scripts/sweeps.py list`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import pandas as pd
from rich.markup import escape

from bild_lab.files import write_atomically
from bild_lab.lab.config.console import console
from bild_lab.lab.config.policies import changed_knobs
from bild_lab.lab.schema.formatting import MISSING, interval, knob_value, number, times
from bild_lab.lab.schema.result import BUSY_PERCENT, Setting
from bild_lab.lab.schema.statistics import ENOUGH_EXAMPLES
from bild_lab.lab.store.groups import data_title, pair_title
from bild_lab.lab.store.progress import read_commands
from bild_lab.ranks import launched

PAGE = "index.html"
_TOO_FEW = "too few examples"


@dataclass(frozen=True)
class Run:
    """A folder with points.

    link: its page, or itself, below outputs. date: of its last new command, ISO. free: the fastest
    point that lost no quality, in words; cheap: the fastest that lost at most one point of it.
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
    if not launched().is_main:
        return
    try:
        write_index(outputs)
    except Exception as error:
        console.print(
            f"[bold]{PAGE} was not written[/bold]: {escape(f'{type(error).__name__}: {error}')}"
        )


def write_index(outputs: Path) -> list[Run]:
    """Write `index.html` into outputs, whole or not at all. Returns its runs, the newest first.

    Everything that came from outside the package is escaped. Raises OSError if the page cannot be
    written.
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
    folders = [
        one
        for one in outputs.iterdir()
        if (one / "points").is_dir() or (one / "report.html").is_file()
    ]
    runs = []
    for folder in folders:
        try:
            runs.append(_run(folder))
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = f"cannot be read: {type(error).__name__}: {error}"
            runs.append(Run(folder.name, f"{folder.name}/", free=said))
    return sorted(runs, key=lambda run: run.date, reverse=True)


def _run(folder: Path) -> Run:
    """A folder's line.

    Its numbers are those of `sweep.csv`; a folder without that was not reported yet.
    """
    table, commands = folder / "sweep.csv", read_commands(folder)
    rows = pd.read_csv(table) if table.is_file() else pd.DataFrame()
    written = (folder if rows.empty else table).stat().st_mtime
    points = {file.parent.name.partition(".")[0] for file in folder.glob("points/*/result.json")}
    settings = [
        Setting(row) for row in rows.astype(object).where(rows.notna(), None).to_dict("records")
    ]
    return Run(
        name=folder.name,
        link=f"{folder.name}/{'report.html' if (folder / 'report.html').is_file() else ''}",
        date=commands[-1].started
        if commands
        else datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds"),
        pair=_several([pair_title(one) for one in settings]),
        data=_several([data_title(one) for one in settings]),
        points=len(points - {""}),  # a folder that begins with a dot is unfinished
        free=_best(rows, 0.0),
        cheap=_best(rows, 1.0),
        command=commands[-1].line if commands else "",
    )


def _best(rows: pd.DataFrame, loss: float) -> str:
    """The fastest point of all settings that lost at most so many points of quality, with its
    interval.
    """
    if rows.empty:
        return MISSING
    drafted = rows.dropna(subset=["speedup", "quality_difference"])
    enough = drafted[drafted["n_examples"] >= ENOUGH_EXAMPLES]
    kept = enough[enough["quality_difference"] >= -loss - 1e-9]
    if kept.empty:
        return _TOO_FEW if enough.empty and not drafted.empty else MISSING
    best = kept.loc[kept["speedup"].idxmax()]
    bounds = interval(
        *(None if pd.isna(best[end]) else best[end] for end in ("speedup_low", "speedup_high"))
    )
    said = f"{_label(best, rows)} {times(best['speedup'])} {bounds}".strip()
    busy, shared = best.get("busy_elsewhere_percent"), best.get("shared_device")
    if pd.notna(busy) and busy > BUSY_PERCENT:
        said += f", machine {number(busy, 0)} % busy"
    return f"{said}, device shared" if pd.notna(shared) and shared else said


def _label(best: pd.Series, rows: pd.DataFrame) -> str:
    """The policy with the knobs in which the point differs from others of its policy, or from the
    policy's file.
    """
    names, peers = list(rows), rows[rows["policy"] == best["policy"]]
    knobs = names[names.index("policy") + 1 : names.index("target")]
    known = {knob: best[knob] for knob in knobs if pd.notna(best[knob])}
    if len(peers) > 1:
        telling = [knob for knob in known if peers[knob].nunique(dropna=False) > 1]
    else:
        telling = changed_knobs(best["policy"], known)
    label = ", ".join(f"{knob} {knob_value(known[knob])}" for knob in telling)
    return f"{best['policy']} ({label})" if label else best["policy"]


def _several(words: Sequence[str]) -> str:
    different = list(dict.fromkeys(words))
    return (
        "; ".join(different)
        if len(different) <= 2
        else f"{different[0]} and {len(different) - 1} more"
    )
