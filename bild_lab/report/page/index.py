"""A plain list of the runs in a folder of outputs: `outputs/index.html`, and the table of
`scripts/sweeps.py list`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from urllib.parse import quote

from rich.markup import escape

from bild_lab.files import holding, write_atomically
from bild_lab.lab.config.console import console
from bild_lab.lab.schema.formatting import MISSING, interval, point_label, times
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import (
    TOLERANCE,
    are_enough,
    can_be_judged,
    corrected_for_choice,
    mean_speedup_with_interval,
)
from bild_lab.lab.store.commands import read_commands
from bild_lab.lab.store.groups import data_title, pair_title, points_of_choice, telling_knobs
from bild_lab.lab.store.records import Sweep
from bild_lab.ranks import launched
from bild_lab.report.provenance import disturbance

PAGE = "index.html"
_TOO_FEW_EXAMPLES, _TIMED_ONCE = "too few examples", "batches timed once"
_USUAL_BASELINE = "vanilla"


@dataclass(frozen=True)
class Run:
    """A folder with points.

    link: its page, or itself, below outputs. date: of its last new command, ISO. pair, data: titles
    of its models and data sets. points: their number. without_loss: the fastest point that lost no
    quality, in words. within_small_loss: the fastest that lost at most its metric's small loss
    (`MetricScale`), such as one point. command: the last one.
    """

    name: str
    link: str
    date: str = ""
    pair: str = ""
    data: str = ""
    points: int = 0
    without_loss: str = ""
    within_small_loss: str = ""
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

    templates = page_environment()
    templates.filters["href"] = lambda path: quote(os.fsencode(path))
    # of two sweeps that end together, the later page is the one that was read later
    with holding(outputs / ".index.lock", patience_s=-1):
        runs = read_runs(outputs)
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
    """A folder's line."""
    results, commands = Sweep(folder).results(), read_commands(folder)
    settings = [result.setting for result in results]
    points = {file.parent.name.partition(".")[0] for file in folder.glob("points/*/result.json")}
    page = "report.html" if (folder / "report.html").is_file() else ""
    if commands:
        date = commands[-1].started
    else:
        table = folder / "sweep.csv"
        written = (table if table.is_file() else folder).stat().st_mtime
        date = datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds")
    return Run(
        name=folder.name,
        link=f"{folder.name}/{page}",
        date=date,
        pair=_summary([pair_title(setting) for setting in settings]),
        data=_summary([data_title(setting) for setting in settings]),
        points=len(points - {""}),  # a folder that begins with a dot is unfinished
        without_loss=_best(results, 0.0),
        within_small_loss=_best(results, 1.0),
        command=commands[-1].line if commands else "",
    )


def _best(results: Sequence[Result], small_losses: float) -> str:
    """The fastest point of all settings that lost at most so many small losses of its metric
    (`MetricScale`), with its interval for the best of all of them, or why none is called so.

    Seeds are no choice: a point that was measured with several counts by its means. An impossible
    speedup, and texts without a word, do not count.
    """
    points = points_of_choice(results)
    compared = [point for point in points if all(map(_is_compared, point))]
    enough = [
        point for point in compared if all(are_enough(result.counted_texts) for result in point)
    ]
    judged = [point for point in enough if all(map(can_be_judged, point))]
    if not judged:
        reason = _TIMED_ONCE if enough else _TOO_FEW_EXAMPLES
        return reason if compared else MISSING
    for point in sorted(judged, key=_means, reverse=True):  # fastest first
        allowed = small_losses * point[0].quality.scale.small_loss + TOLERANCE
        if _means(point)[1] >= -allowed and all(result.may_be_best for result in point):
            return _best_words(point, results, len(points))
    return MISSING


def _is_compared(result: Result) -> bool:
    return None not in (result.speedup.value, result.quality.difference)


def _means(point: Sequence[Result]) -> tuple[float, float]:
    """The mean speedup and the mean difference in quality of a point over its seeds."""
    speedup, *_ = mean_speedup_with_interval([result.speedup.value for result in point])
    return speedup, mean(result.quality.difference for result in point)


def _best_words(point: Sequence[Result], results: Sequence[Result], n_points: int) -> str:
    """A point with its speedup, over which baseline if that is not the usual one, and why its timing
    cannot be relied on.

    point: its results, one for each seed. n_points: of how many it is the best.
    """
    first_seed = point[0]
    if len(point) > 1:
        speedups = [result.speedup.value for result in point]
        speedup, *bounds = mean_speedup_with_interval(speedups, n_points)
        details = [f"mean of {len(point)} seeds"]
    else:
        corrected, details = corrected_for_choice(first_seed, n_points).speedup, []
        speedup, bounds = corrected.value, [corrected.low, corrected.high]
    label = point_label(first_seed, telling_knobs(results)(first_seed), results)
    words = f"{label} {times(speedup)} {interval(*bounds)}".strip()
    baselines = dict.fromkeys(result.setting.baseline for result in point)
    details += [f"over {baseline}" for baseline in baselines if baseline != _USUAL_BASELINE]
    doubts = dict.fromkeys(map(disturbance, point))
    return ", ".join(filter(None, [words, *details, *doubts]))


def _summary(titles: Sequence[str]) -> str:
    """One title or two; of more the first, and how many more there are."""
    different = list(dict.fromkeys(titles))
    if len(different) <= 2:
        return "; ".join(different)
    return f"{different[0]} and {len(different) - 1} more"
