"""A sweep's points as one table, `sweep.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bild_lab.files import write_atomically
from bild_lab.lab.schema.columns import IDENTITY, TABLE
from bild_lab.lab.schema.result import Result


def to_row(result: Result) -> dict[str, Any]:
    """One result as a flat row: identity, knobs under their own names, then the measured numbers."""
    row = {column.name: column.of(result) for column in TABLE}
    knobs = {_knob_column(knob): value for knob, value in result.knobs.items()}
    return {**{column.name: row.pop(column.name) for column in IDENTITY}, **knobs, **row}


def to_frame(results: Sequence[Result]) -> pd.DataFrame:
    """One row per point; knobs that a policy does not have are empty."""
    knobs = dict.fromkeys(_knob_column(knob) for result in results for knob in result.knobs)
    identity, others = TABLE[: len(IDENTITY)], TABLE[len(IDENTITY) :]
    columns = [*(column.name for column in identity), *knobs, *(column.name for column in others)]
    return pd.DataFrame([to_row(result) for result in results], columns=columns)


def write_table(results: Sequence[Result], path: Path) -> None:
    """Write `sweep.csv` atomically."""
    write_atomically(path, to_frame(results).to_csv(index=False).encode())


def _knob_column(knob: str) -> str:
    """The knob's own name, or knob_NAME if a measured number has that name, such as `acceptance_rate`."""
    return f"knob_{knob}" if knob in {column.name for column in TABLE} else knob
