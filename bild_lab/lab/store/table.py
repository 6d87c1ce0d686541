"""The table of a sweep, `sweep.csv`, and the same as a frame: a row per point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.config.policies import flat_values
from bild_lab.lab.schema.columns import knob_columns
from bild_lab.lab.schema.result import IDENTITY, TABLE, Result, Setting
from bild_lab.lab.store.groups import varying_keys
from bild_lab.lab.store.hashing import plain_numbers
from bild_lab.lab.store.records import Sweep

_TAKEN = frozenset(column.name for column in TABLE)  # columns that every table has


def load_results(*folders: str | Path) -> pd.DataFrame:
    """The finished points of sweeps: a row per point, in the order of the folders, each sweep
    oldest first.

    folders: of sweeps, `"outputs/NAME"`. The first column, `sweep`, is the folder's name; the
    others are those of `sweep.csv` (docs/outputs.md), knobs under their own names. What a point
    does not have is NaN or None. Points with another setting, such as other data, are rows like the
    others: compare within equal `target`, `dataset` and so on.

    Raises UserError for a folder without finished points, and for results of a newer version of the
    package.
    """
    frames = []
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise UserError(
                'folders are given one by one, load_results("outputs/a", "outputs/b"), got'
                f" {folder!r}"
            )
        path = Path(folder).expanduser()
        frames.append((path.resolve().name, Sweep(path).finished()))
    if not frames:
        raise UserError(
            'a folder is needed, got none; give the folder of a sweep: load_results("outputs/NAME")'
        )
    table = to_frame([result for _, results in frames for result in results])
    table.insert(0, "sweep", [name for name, results in frames for _ in results])
    return table


def to_row(result: Result) -> dict[str, Any]:
    """One result as a flat row: identity, knobs under their own names, then the measured
    numbers.
    """
    row = {column.name: column.of(result) for column in TABLE} | _further(result)
    knobs = knob_columns(
        {knob: math.inf if value == "inf" else value for knob, value in result.knobs.items()},
        _TAKEN,
    )
    return {**{column.name: row.pop(column.name) for column in IDENTITY}, **knobs, **row}


def to_frame(results: Sequence[Result]) -> pd.DataFrame:
    """One row per point; knobs that a policy does not have are empty.

    The last columns are the keys of the setting in which these points differ, without those that
    every table has.
    """
    knobs = knob_columns(dict.fromkeys(knob for result in results for knob in result.knobs), _TAKEN)
    identity_columns, measured_columns = TABLE[: len(IDENTITY)], TABLE[len(IDENTITY) :]
    further = dict.fromkeys(name for result in results for name in _further(result))
    columns = [
        *(column.name for column in identity_columns),
        *knobs,
        *(column.name for column in measured_columns),
        *further,
    ]
    frame = pd.DataFrame([to_row(result) for result in results], columns=columns)
    settings = pd.DataFrame(_differing_settings(results, columns), index=frame.index)
    return pd.concat([frame, settings], axis=1)


def _differing_settings(results: Sequence[Result], columns: Sequence[str]) -> dict[str, list[Any]]:
    """The values of the settings that differ, by key, such as `seed` or `decoding.top_p`.

    columns: those of the table; a key with the name of one is called setting_NAME.
    """
    settings = [plain_numbers(flat_values(dict(result.setting))) for result in results]
    known = {column.name for column in Setting.KEYS} | {"decoding.temperature"}
    return {
        f"setting_{key}" if key in columns else key: [setting.get(key) for setting in settings]
        for key in varying_keys(settings)
        if key not in known
    }


def _further(result: Result) -> dict[str, float | None]:
    """The metrics behind the leading one, each with its interval and its difference from the
    baseline's.
    """
    row: dict[str, float | None] = {}
    for name, quality in result.further_qualities.items():
        if name in _TAKEN:  # the log-probability by the target is a column of every point
            continue
        row |= {name: quality.value, f"{name}_low": quality.low, f"{name}_high": quality.high}
        bounds = (quality.difference, quality.difference_low, quality.difference_high)
        row |= dict(
            zip((f"{name}_difference{end}" for end in ("", "_low", "_high")), bounds, strict=True)
        )
    return row


def write_table(results: Sequence[Result], path: Path) -> None:
    """Write `sweep.csv` atomically."""
    write_csv(path, to_frame(results))


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV atomically. path: of the file, or of a figure that shows the values: then
    the file has its name.
    """
    write_atomically(path.with_suffix(".csv"), table.to_csv(index=False).encode())
