"""Screened planes in the HTML report: every point that was decoded over a record, to walk through by its knobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bild_lab.lab.formatting import knob_value
from bild_lab.lab.schema.result import Result
from bild_lab.lab.screening.rows import TABLE, Row
from bild_lab.report.style import Mark

NUMBERS = (  # of a point, with so many decimals
    ("predicted_speedup", 4),
    ("quality", 3),
    ("quality_low", 3),
    ("quality_high", 3),
    ("quality_difference", 3),
    ("quality_difference_low", 3),
    ("quality_difference_high", 3),
    ("tokens_per_target_call", 3),
    ("target_calls", 0),
    ("draft_calls", 0),
    ("acceptance_rate", 4),
    ("fallbacks", 0),
    ("rollbacks", 0),
)


def screened_policies(folder: Path) -> list[str]:
    """The policies in a sweep's screened table; none without a table."""
    frame = _table(folder)
    return [] if frame is None else sorted(set(frame.policy))


def planes(folder: Path, results: Sequence[Result], colours: Mapping[str, Mark]) -> list[dict[str, Any]]:
    """What the report shows of each split and number of examples that were screened in a sweep's folder.

    A point has its numbers, the place of each knob among the policy's values, and the live measurement that confirmed
    it; null where it has none.
    """
    frame = _table(folder)
    if frame is None:
        return []
    measured = {result.point: result for result in results}
    return [
        {
            "split": split,
            "examples": int(count),
            "metric": group.quality_metric.iloc[0],
            **_policies(group, colours, measured),
            "sources": [],
            "texts": [],
            "pieces": {},
        }
        for (split, count), group in frame.groupby(["split", "n_examples"])
    ]


def _table(folder: Path) -> pd.DataFrame | None:
    file = folder / TABLE
    if not file.is_file():
        return None
    frame = pd.read_csv(file, keep_default_na=False, na_values={name: [""] for name, _ in NUMBERS})
    frame = frame.dropna(subset=["predicted_speedup"])  # a plane is drawn over speed
    return None if frame.empty else frame


def _knobs(frame: pd.DataFrame) -> list[str]:
    """The columns that are knobs and have a value in some row."""
    others = {*Row.__dataclass_fields__}
    return [name for name in frame.columns if name not in others and (frame[name].astype(str) != "").any()]


def _policies(
    group: pd.DataFrame, colours: Mapping[str, Mark], measured: Mapping[str, Result]
) -> dict[str, list[dict[str, Any]]]:
    """The policies with the values of their knobs, and the points with their places among these."""
    policies, points = [], []
    for name, rows in group.groupby("policy"):
        values = {knob: _values(rows[knob]) for knob in _knobs(rows)}
        knobs = [{"name": knob, "values": [knob_value(value) for value in own]} for knob, own in values.items()]
        policies.append({"name": name, "colour": colours[name].colour, "knobs": knobs})
        for _, row in rows.iterrows():
            live = measured.get(row.confirmed)
            points.append(
                {
                    "policy": name,
                    "at": [own.index(_read(row[knob])) for knob, own in values.items()],
                    "front": bool(row.on_front),
                    "live": None if live is None else _confirmation(live),
                    "texts": None,
                    **{key: None if pd.isna(row[key]) else round(float(row[key]), digits) for key, digits in NUMBERS},
                }
            )
    return {"policies": policies, "points": points}


def _values(cells: pd.Series) -> list[float | str]:
    """The values of a knob, numbers by size."""
    return sorted({_read(cell) for cell in cells}, key=lambda value: (isinstance(value, str), value))


def _read(cell: Any) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return str(cell)


def _confirmation(result: Result) -> dict[str, Any]:
    speedup, quality = result.speedup, result.quality
    return {
        "split": result.setting.split,
        "examples": result.setting.n_examples,
        "speedup": [speedup.value, speedup.low, speedup.high],
        "difference": [quality.difference, quality.difference_low, quality.difference_high],
    }
