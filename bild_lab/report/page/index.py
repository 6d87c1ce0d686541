"""A plain list of the runs in a folder of outputs: `outputs/index.html`, and the table of
`scripts/sweeps.py list`.
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

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.config.console import console
from bild_lab.lab.config.policies import changed_knobs
from bild_lab.lab.schema.formatting import MISSING, interval, short_value, times
from bild_lab.lab.schema.numbers import scale_of
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.lab.schema.statistics import (
    TOLERANCE,
    are_enough,
    mean_speedup_with_interval,
    speedup_interval_of_best,
)
from bild_lab.lab.store.groups import data_title, differing_in, pair_title
from bild_lab.lab.store.progress import read_commands
from bild_lab.lab.store.records import Sweep
from bild_lab.ranks import launched
from bild_lab.report.provenance import disturbance

PAGE = "index.html"
_TOO_FEW_EXAMPLES, _TIMED_ONCE = "too few examples", "batches timed once"
_USUAL_BASELINE = "vanilla"
_SPEEDUP_ENDS = ("speedup_low", "speedup_high")


@dataclass(frozen=True)
class Run:
    """A folder with points.

    link: its page, or itself, below outputs. date: of its last new command, ISO. pair, data: titles
    of its models and data sets. points: their number. without_loss: the fastest point that lost no
    quality, in words. within_one_point: the fastest that lost at most one point of it, or what its
    metric has in place of points (`MetricScale`). command: the last one.
    """

    name: str
    link: str
    date: str = ""
    pair: str = ""
    data: str = ""
    points: int = 0
    without_loss: str = ""
    within_one_point: str = ""
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
        folder
        for folder in outputs.iterdir()
        if (folder / "points").is_dir() or (folder / "report.html").is_file()
    ]
    runs = []
    for folder in folders:
        try:
            runs.append(_run(folder))
        except (OSError, ValueError, KeyError, TypeError) as error:
            fault = f"cannot be read: {type(error).__name__}: {error}"
            runs.append(Run(folder.name, f"{folder.name}/", without_loss=fault))
    return sorted(runs, key=lambda run: run.date, reverse=True)


def _run(folder: Path) -> Run:
    """A folder's line.

    Its numbers are those of `sweep.csv`; a folder without that was not reported yet.
    """
    table, commands = folder / "sweep.csv", read_commands(folder)
    rows = pd.read_csv(table, dtype={"point": str}) if table.is_file() else pd.DataFrame()
    known = rows.astype(object).where(rows.notna(), None)
    settings = [Setting(row) for row in known.to_dict("records")]
    points = {file.parent.name.partition(".")[0] for file in folder.glob("points/*/result.json")}
    page = "report.html" if (folder / "report.html").is_file() else ""
    if commands:
        date = commands[-1].started
    else:
        written = (folder if rows.empty else table).stat().st_mtime
        date = datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds")
    return Run(
        name=folder.name,
        link=f"{folder.name}/{page}",
        date=date,
        pair=_summary([pair_title(setting) for setting in settings]),
        data=_summary([data_title(setting) for setting in settings]),
        points=len(points - {""}),  # a folder that begins with a dot is unfinished
        without_loss=_best(rows, folder, 0.0),
        within_one_point=_best(rows, folder, 1.0),
        command=commands[-1].line if commands else "",
    )


def _are_baselines(rows: pd.DataFrame, folder: Path) -> pd.Series:
    """Of each point whether it is the baseline itself, which has its own quality."""
    alike = rows[rows["quality_difference"] == 0]
    results = {place: _stored_result(folder, row) for place, row in alike.iterrows()}
    baselines = [place for place, result in results.items() if result and result.is_baseline]
    return pd.Series(rows.index.isin(baselines), rows.index)


def _counted_texts(rows: pd.DataFrame) -> pd.Series:
    """Of each point how many texts its intervals are over (`Result.counted_texts`)."""
    if "independent_texts" not in rows.columns:
        return rows["n_examples"]
    return rows["independent_texts"].fillna(rows["n_examples"])


def _clocks_unknown(rows: pd.DataFrame) -> pd.Series:
    """Of each point whether nothing says how far its clock is off (`Result.clock_is_known`)."""
    unknown = pd.Series(False, rows.index)
    if "batch" in rows.columns:
        unknown |= (rows["batch"] > 1) & rows["speedup_noise"].isna()
    return unknown


def _best(rows: pd.DataFrame, folder: Path, small_losses: float) -> str:
    """The fastest point of all settings that lost at most so many small losses of its metric
    (`MetricScale`), with its interval for the best of all of them, or why none is called so.

    Seeds are no choice: a point that was measured with several counts by its means. An impossible
    speedup, and texts without a word, do not count.
    """
    if rows.empty:
        return MISSING
    compared = rows.dropna(subset=["speedup", "quality_difference"])
    compared = compared[~_are_baselines(compared, folder)]
    enough = compared[_counted_texts(compared).map(are_enough)]
    if enough.empty:
        return MISSING if compared.empty else _TOO_FEW_EXAMPLES
    enough = enough[~_clocks_unknown(enough)]
    if enough.empty:
        return _TIMED_ONCE
    points = _points(enough, folder)

    def means(point: pd.DataFrame) -> tuple[float, float]:
        speedup, *_ = mean_speedup_with_interval(point["speedup"].tolist())
        return speedup, point["quality_difference"].mean()

    fastest_first = sorted(points, key=means, reverse=True)
    for point in fastest_first:
        loss = small_losses * scale_of(point["quality_metric"].iloc[0]).small_loss
        if means(point)[1] < -loss - TOLERANCE:
            continue
        results = [_stored_result(folder, row) for _, row in point.iterrows()]
        known = [result for result in results if result is not None]
        if all(result.may_be_best for result in known):
            return _best_words(point, rows, known, len(points))
    return MISSING


def _points(rows: pd.DataFrame, folder: Path) -> list[pd.DataFrame]:
    """The rows of each point: one, or several that differ in nothing but the seed."""
    columns = list(rows)
    knobs = columns[columns.index("policy") + 1 : columns.index("target")]
    shown = [column.name for column in Setting.KEYS if column.name in columns]
    alike = rows[rows.duplicated(["policy", *knobs, *shown], keep=False)]
    # the table has no seeds, and not all of a setting
    stored = [_stored_result(folder, row) for _, row in alike.iterrows()]
    results = [result for result in stored if result is not None]
    place_of = {
        result.point: place
        for place, by_seed in enumerate(differing_in("seed", results))
        for result in by_seed.values()
    }
    places = [place_of.get(str(point), str(point)) for point in rows["point"]]
    return [group for _, group in rows.groupby(places, sort=False)]


def _best_words(
    best: pd.DataFrame, rows: pd.DataFrame, results: Sequence[Result], n_points: int
) -> str:
    """A point with its speedup, over which baseline if that is not the usual one, and why its timing
    cannot be relied on.

    best: its rows, one for each seed. results: those of them that can be read. n_points: of how many
    it is the best.
    """
    first = best.iloc[0]
    if len(best) > 1:
        speedup, low, high = mean_speedup_with_interval(best["speedup"].tolist(), n_points)
        details = [f"mean of {len(best)} seeds"]
    else:
        speedup, details = first["speedup"], []
        low, high = (None if pd.isna(first[end]) else first[end] for end in _SPEEDUP_ENDS)
        if n_points > 1 and None not in (low, high):
            texts = int(_counted_texts(best).iloc[0])
            low, high = speedup_interval_of_best(speedup, low, high, n_points, texts)
    words = f"{_label(first, rows)} {times(speedup)} {interval(low, high)}".strip()
    baselines = dict.fromkeys(result.setting.baseline for result in results)
    details += [f"over {baseline}" for baseline in baselines if baseline != _USUAL_BASELINE]
    doubts = dict.fromkeys(disturbance(result) for result in results)
    return ", ".join(filter(None, [words, *details, *doubts]))


def _stored_result(folder: Path, row: pd.Series) -> Result | None:
    """A point's newest stored result, whose numbers the row has; None where none can be read."""
    try:
        return Sweep(folder).newest(str(row["point"]))
    except UserError:  # of another version
        return None


def _label(best: pd.Series, rows: pd.DataFrame) -> str:
    """The policy with the knobs in which the point differs from others of its policy, or from the
    policy's file.
    """
    columns, policy = list(rows), best["policy"]
    policy_rows = rows[rows["policy"] == policy]
    knob_columns = columns[columns.index("policy") + 1 : columns.index("target")]
    # Python's own values: numpy's True is written as another word than the file's
    values = best.astype(object).to_dict()
    knobs = {knob: values[knob] for knob in knob_columns if pd.notna(values[knob])}
    if len(policy_rows) > 1:
        named = [knob for knob in knobs if policy_rows[knob].nunique(dropna=False) > 1]
    else:
        named = changed_knobs(policy, knobs)
    label = ", ".join(f"{knob} {short_value(knobs[knob], policy_rows[knob])}" for knob in named)
    return f"{policy} ({label})" if label else policy


def _summary(titles: Sequence[str]) -> str:
    """One title or two; of more the first, and how many more there are."""
    different = list(dict.fromkeys(titles))
    if len(different) <= 2:
        return "; ".join(different)
    return f"{different[0]} and {len(different) - 1} more"
