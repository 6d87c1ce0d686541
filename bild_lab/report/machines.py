"""The same point of several runs side by side: the median run, the range, and each run's machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from bild_lab.errors import UserError
from bild_lab.lab.schema.formatting import (
    MISSING,
    counted,
    knob_label,
    number,
    short_name,
)
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.lab.store.groups import flat_setting, telling_knobs, varying_keys
from bild_lab.lab.store.table import write_csv
from bild_lab.report.matching import MatchedRuns, identity_columns, match_runs
from bild_lab.report.provenance import disturbance
from bild_lab.report.terminal import DISTURBED, narrow_table, speedup_text, widen

TABLE = "machines.csv"
_MEDIAN = "\u25cf"
_LEGEND = (
    f"{_MEDIAN} the median run, of an even number the slower of the two in the middle; its 95 %"
    " interval is over its texts, the range over the runs. GB/s: read bandwidth of the device;"
    " eight rows: what checking them costs, in tokens."
)
# keys of the setting that may differ between two runs of a point
_OF_MACHINES = ("hardware", "threads", "code", "target", "draft", "second_draft", "device")


@dataclass(frozen=True)
class PointRuns:
    """A point in several runs. results: by the name of the sweep, slowest first.

    label: its policy with the knobs and the values of the setting that tell it from others.
    distinct: these values.
    """

    label: str
    results: Mapping[str, Result]
    distinct: Mapping[str, Any]

    @property
    def median_name(self) -> str:
        """The sweep whose speedup is the median: a run that exists, the lower one of two."""
        names = list(self.results)
        return names[(len(names) - 1) // 2]

    @property
    def median(self) -> Result:
        return self.results[self.median_name]

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest speedup."""
        speedups = [result.speedup.value for result in self.results.values()]
        return speedups[0], speedups[-1]


def point_runs(sweeps: Mapping[str, Sequence[Result]]) -> list[PointRuns]:
    """The timed points of all sweeps, by their names, with their runs.

    Raises UserError if no point was timed beside a baseline.
    """
    timed = {
        name: [
            result
            for result in results
            if result.speedup.value is not None and not result.is_baseline
        ]
        for name, results in sweeps.items()
    }
    if not any(timed.values()):
        raise UserError(
            "no point was timed beside a baseline, so there are no speedups to lay side by side;"
            " measure with measure.baseline=vanilla"
        )
    matched = match_runs(machines_apart(timed), timed.values())
    all_results = [result for results in timed.values() for result in results]
    telling = telling_knobs(all_results)
    return [
        PointRuns(
            _label(runs, telling, all_results),
            # the slowest first
            dict(sorted(runs.results.items(), key=lambda run: run[1].speedup.value)),
            runs.distinct,
        )
        for runs in matched
    ]


def machines_apart(sweeps: Mapping[str, Sequence[Result]]) -> dict[str, list[Result]]:
    """The results of each sweep by its name; of a sweep that was merged from several machines those
    of each machine, by the names of both.
    """
    by_run: dict[str, list[Result]] = {}
    for name, results in sweeps.items():
        devices = {result.setting.device for result in results}
        machines = {(result.setting.device, result.setting.hardware) for result in results}
        for result in results:
            is_merged = len(machines) > len(devices)
            run_name = f"{name}, {_machine(result)}" if is_merged else name
            by_run.setdefault(run_name, []).append(result)
    return by_run


def _label(
    runs: MatchedRuns, telling: Callable[[Result], list[str]], results: Sequence[Result]
) -> str:
    result = next(iter(runs.results.values()))
    words = [f"{key} {short_name(str(value))}" for key, value in runs.distinct.items()]
    knobs = knob_label(result, telling(result), among=results)
    return f"{result.policy} {', '.join(filter(None, [knobs, *words]))}".strip()


def machines_table(points: Sequence[PointRuns]) -> Table:
    """Each point with its median speedup and its range, and below it every run."""
    table = narrow_table()
    table.add_column("", width=1)
    table.add_column("point, its runs", ratio=1, overflow="fold")
    for title in ("speedup", "GB/s", "eight\nrows"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("machine", ratio=1, overflow="fold")
    for point in points:
        low, high = point.range
        spread = counted(len(point.results), "run")
        if len(point.results) > 1:
            spread += f", {number(low)} to {number(high)}"
        median_speedup = speedup_text(point.median.speedup)
        table.add_row("", Text(point.label), Text(median_speedup), "", "", spread, style="bold")
        for name, result in point.results.items():
            mark = DISTURBED if disturbance(result) else ""
            cells = [
                f"  {name}",
                f"{mark}{speedup_text(result.speedup)}",
                _column_text("read_gb_per_s", result),
                _column_text("eight_rows_cost", result),
                _machine(result),
            ]
            is_median = name == point.median_name
            table.add_row(_MEDIAN if is_median else "", *map(Text, cells))
        table.add_section()
    table.caption = Text(_LEGEND, style="dim", justify="left")
    widen(table)
    return table


def machines_frame(points: Sequence[PointRuns]) -> pd.DataFrame:
    """One row per point and run; what an older run did not measure is empty."""
    return pd.DataFrame(
        [
            _frame_row(point, name, result)
            for point in points
            for name, result in point.results.items()
        ]
    )


def _frame_row(point: PointRuns, name: str, result: Result) -> dict[str, Any]:
    low, high = point.range
    numbers = (
        "read_gb_per_s",
        "eight_rows_cost",
        "quality_difference",
        "quality_difference_low",
        "quality_difference_high",
        "non_inferiority_margin",
        "non_inferiority_lower_bound",
        "non_inferiority_p_value",
        "tokens_per_target_call",
        "baseline_tokens_per_s",
        "n_examples",
    )
    return {
        **identity_columns(result, point.distinct),
        "sweep": name,
        "is_median": name == point.median_name,
        "speedup": result.speedup.value,
        "speedup_low": result.speedup.low,
        "speedup_high": result.speedup.high,
        "runs": len(point.results),
        "runs_lowest": low,
        "runs_highest": high,
        **{column: COLUMNS[column].of(result) for column in numbers},
        "machine": _machine(result),
        "commit": result.environment.git,
        "started": result.environment.started,
        "disturbed": disturbance(result),
    }


def write_machines(folder: Path, points: Sequence[PointRuns]) -> None:
    """Write `machines.csv` atomically."""
    write_csv(folder / TABLE, machines_frame(points))


def runs_notes(points: Sequence[PointRuns]) -> list[str]:
    """What a reader must know: keys of the setting in which runs of a point differ, and runs that
    were disturbed.
    """
    values: dict[str, dict[str, None]] = {}
    disturbed: dict[str, str] = {}  # by the sweep
    for point in points:
        settings = [flat_setting(result) for result in point.results.values()]
        for key in varying_keys(settings):
            if key not in _OF_MACHINES:
                texts = dict.fromkeys(str(setting.get(key)) for setting in settings)
                values.setdefault(key, {}).update(texts)
        for name, result in point.results.items():
            if reason := disturbance(result):
                disturbed.setdefault(name, reason)
    remarks = [f"The runs differ in {key}: {', '.join(texts)}." for key, texts in values.items()]
    if disturbed:
        words = "; ".join(f"{name}: {reason}" for name, reason in disturbed.items())
        remarks.append(
            f"{DISTURBED} Do not rely on these timings: {words}. Measure them again"
            " on a quiet machine."
        )
    return remarks


def _column_text(name: str, result: Result) -> str:
    """A number of the environment; a dash for a run of before it was measured."""
    column = COLUMNS[name]
    return number(column.of(result), column.digits)


def _machine(result: Result) -> str:
    return result.setting.hardware or result.setting.device or MISSING
