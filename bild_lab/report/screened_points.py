"""The points that a screening predicted, as its table `screen.csv` in a sweep's folder has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bild_lab.lab.schema.result import Result
from bild_lab.screening.rows import TABLE, read_table


@dataclass(frozen=True)
class ScreenedPoint:
    """A screened point: a row of `screen.csv`. live: the point that confirmed it."""

    policy: str
    knobs: Mapping[str, Any]
    row: Mapping[str, Any]
    live: Result | None

    @property
    def speedup(self) -> float:
        """The predicted one."""
        return self.row["predicted_speedup"]

    @property
    def latency(self) -> float:
        """The predicted one, relative to the baseline's."""
        return 1 / self.speedup

    @property
    def difference(self) -> float:
        """The difference in quality from the baseline's."""
        return self.row["quality_difference"]

    @property
    def certified(self) -> str:
        """What is certified of it, in words; empty for nothing, and in a table of an older version."""
        return self.row["certified"] if isinstance(self.row.get("certified"), str) else ""


def was_screened(folder: Path) -> bool:
    """Whether a sweep's folder has a table of screened points."""
    return (folder / TABLE).is_file()


def screened_on(result: Result) -> str | None:
    """The split on whose texts a screening chose this point, by the table in its sweep's folder; None
    if none did.
    """
    if result.folder is None or not was_screened(folder := result.folder.parents[1]):
        return None
    table = read_table(folder / TABLE)
    splits = table["split"][table["confirmed"] == result.point]
    return None if splits.empty else str(splits.iloc[0])


def screened_points(folder: Path, results: Sequence[Result]) -> list[ScreenedPoint]:
    """The points that were screened in a sweep's folder and whose speed was predicted; none without
    their table.

    results: the points of the sweep, which confirm some of the screened ones.
    """
    if not was_screened(folder):
        return []
    table = read_table(folder / TABLE).dropna(subset="predicted_speedup")
    columns = list(table)
    knobs = columns[columns.index("policy") + 1 : columns.index("split")]
    measured = {result.point: result for result in results}
    return [
        ScreenedPoint(
            row["policy"],
            {knob: row[knob] for knob in knobs if pd.notna(row[knob])},
            row,
            measured.get(row["confirmed"]),
        )
        for row in table.to_dict("records")
    ]
