"""The points of sweeps as one table: `sweep.csv`, and `bild_lab.load_results`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import IDENTITY, TABLE, Result


def load_results(*folders: str | Path) -> pd.DataFrame:
    """The finished points of sweeps: a row per point, in the order of the folders, each sweep oldest first.

    folders: of sweeps, `"outputs/NAME"`. The first column, `sweep`, is the folder's name; the others are those of
    `sweep.csv` (docs/outputs.md), knobs under their own names. What a point does not have is NaN or None. Points with
    another setting, such as other data, are rows like the others: compare within equal `target`, `dataset` and so on.

    Raises UserError for a folder without finished points, and for results of a newer version of the package.
    """
    frames = []
    for folder in folders:
        path = Path(folder).expanduser()
        results = Sweep(path).results()
        if not results:
            raise UserError(f"{folder} has no finished points; give the folder of a sweep, outputs/NAME")
        frames.append((path.resolve().name, results))
    if not frames:
        raise UserError('a folder is needed, got none; give the folder of a sweep: load_results("outputs/NAME")')
    found = to_frame([result for _, results in frames for result in results])
    found.insert(0, "sweep", [name for name, results in frames for _ in results])
    return found


def to_row(result: Result) -> dict[str, Any]:
    """One result as a flat row: identity, knobs under their own names, then the measured numbers."""
    row = {column.name: column.of(result) for column in TABLE} | _further(result)
    knobs = {_knob_column(knob): math.inf if value == "inf" else value for knob, value in result.knobs.items()}
    return {**{column.name: row.pop(column.name) for column in IDENTITY}, **knobs, **row}


def to_frame(results: Sequence[Result]) -> pd.DataFrame:
    """One row per point; knobs that a policy does not have are empty."""
    knobs = dict.fromkeys(_knob_column(knob) for result in results for knob in result.knobs)
    identity, others = TABLE[: len(IDENTITY)], TABLE[len(IDENTITY) :]
    further = dict.fromkeys(name for result in results for name in _further(result))
    columns = [*(column.name for column in identity), *knobs, *(column.name for column in others), *further]
    return pd.DataFrame([to_row(result) for result in results], columns=columns)


def _further(result: Result) -> dict[str, float | None]:
    """The metrics behind the leading one, each with its interval and its difference from the baseline's."""
    row: dict[str, float | None] = {}
    for name, quality in result.further_qualities.items():
        row |= {name: quality.value, f"{name}_low": quality.low, f"{name}_high": quality.high}
        bounds = (quality.difference, quality.difference_low, quality.difference_high)
        row |= dict(zip((f"{name}_difference{end}" for end in ("", "_low", "_high")), bounds, strict=True))
    return row


def write_table(results: Sequence[Result], path: Path) -> None:
    """Write `sweep.csv` atomically."""
    write_atomically(path, to_frame(results).to_csv(index=False).encode())


def _knob_column(knob: str) -> str:
    """The knob's own name, or knob_NAME if a measured number has that name, such as `acceptance_rate`."""
    return f"knob_{knob}" if knob in {column.name for column in TABLE} else knob
