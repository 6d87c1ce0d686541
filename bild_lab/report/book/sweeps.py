"""The lab book's entry of a sweep, a screening or a search."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bild_lab.files import is_held
from bild_lab.lab.formatting import knob_value
from bild_lab.lab.results.groups import Group, by_setting, data_title, pair_title
from bild_lab.lab.results.progress import PROGRESS, is_running, read_progress
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Failure, Result
from bild_lab.lab.screening.rows import SUMMARY
from bild_lab.report.book.entry import DAMAGED, FAILED, FINISHED, INTERRUPTED, RUNNING, SCREENING, SWEEP, Entry
from bild_lab.report.book.pictures import plane
from bild_lab.report.headline import headline, leading

MOST_POINTS = 100  # of a sweep on the page, to compare it by
STUDY, TUNED = "study.sqlite", "tuned.json"  # of a search
_DIGITS = 5  # of numbers on the page


def is_sweep(folder: Path) -> bool:
    """Whether the folder holds points, or was to hold them."""
    return any((folder / name).exists() for name in ("points", "sweep.csv", PROGRESS, SUMMARY, STUDY))


def read_sweep(folder: Path) -> Entry:
    """The entry of a folder with points, or with a screened plane. Raises UserError for results of a newer version."""
    sweep = Sweep(folder)
    results, failures = sweep.results(), sweep.failures()
    groups = by_setting(results)
    chosen, left_out = _chosen(groups)
    state, progress = _state(folder, results, failures)
    leader = leading(groups)
    return Entry(
        name=folder.name,
        kind=SCREENING if any((folder / name).is_file() for name in (SUMMARY, STUDY, TUNED)) else SWEEP,
        headline=" ".join(filter(None, [_screened(folder), _headline(results)])),
        pair=_distinct([pair_title(group.setting) for group in groups]),
        data=_distinct([data_title(group.setting) for group in groups]),
        date=max((one.stored_at or one.environment.started for one in results), default=""),
        state=state,
        progress=progress,
        picture=None if leader is None else plane(leader),
        settings=[_flat(group) for group in groups],
        points=chosen,
        points_left_out=left_out,
    )


def _headline(results: Sequence[Result]) -> str:
    """What the sweep found, in the words of its report; empty without a finished point."""
    return headline(results) if results else ""


def _screened(folder: Path) -> str:
    """How many points a screening has decoded over its record; empty for others."""
    file = folder / SUMMARY
    if not file.is_file():
        return ""
    points = json.loads(file.read_bytes())["points"]
    return f"{points:,} point{'' if points == 1 else 's'} screened."


def _state(folder: Path, results: Sequence[Result], failures: Sequence[Failure]) -> tuple[str, str]:
    """The state of the folder, and how far it is in words."""
    damaged = sum(failure.error.type == "Damaged" for failure in failures)
    progress = read_progress(folder)
    if progress is not None and not progress.ended:
        return (RUNNING if is_running(folder) else INTERRUPTED), str(progress)
    if damaged:
        return DAMAGED, f"{damaged} of {_points(len(results) + damaged)} damaged"
    if failures:
        return FAILED, f"{len(failures)} of {_points(len(results) + len(failures))}"
    if (folder / STUDY).is_file() and not (folder / TUNED).is_file():
        return (RUNNING if is_held(folder / ".search.lock") else INTERRUPTED), _points(len(results))
    return FINISHED, _points(len(results)) if results else ""


def _chosen(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], int]:
    """The points to compare by, and how many are left out: first those that are neither notable nor on the front."""
    chosen = []
    for index, group in enumerate(groups):
        selected = group.selected()
        others = [one for one in group.results if not any(one is each for each in selected)]
        chosen += [_point(index, group, one) for one in [*selected, *others][: MOST_POINTS - len(chosen)]]
    return chosen, sum(len(group.results) for group in groups) - len(chosen)


def _point(index: int, group: Group, one: Result) -> dict[str, Any]:
    quality, speedup = one.quality, one.speedup
    numbers = {
        "speedup": speedup.value,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "quality": quality.value,
        "difference": quality.difference,
        "difference_low": quality.difference_low,
        "difference_high": quality.difference_high,
    }
    return {
        "setting": index,
        "policy": one.policy,
        "knobs": {knob: knob_value(value) for knob, value in one.knobs.items()},
        "metric": one.quality.metric,
        "baseline": one.is_baseline,
        "front": any(one is other for other in group.front()),
        **{name: _short(value) for name, value in numbers.items()},
    }


def _flat(group: Group) -> dict[str, str]:
    """The setting in words; its groups, such as decoding, are merged into one mapping."""
    flat: dict[str, str] = {}
    for key, value in group.setting.items():
        parts = value if isinstance(value, dict) else {key: value}
        flat |= {name: knob_value(part) for name, part in parts.items()}
    return flat


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def _distinct(words: Sequence[str]) -> str:
    several = list(dict.fromkeys(words))
    return "; ".join(several) if len(several) <= 2 else f"{several[0]} and {len(several) - 1} more"


def _points(count: int) -> str:
    return f"{count} point{'' if count == 1 else 's'}"
