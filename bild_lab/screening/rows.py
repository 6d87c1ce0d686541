"""The screened points as a table, `screen.csv`, and what the screening cost, `screen.json`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from bild_lab.errors import UserError
from bild_lab.files import write_json
from bild_lab.lab.schema.columns import knob_columns
from bild_lab.lab.schema.formatting import counted
from bild_lab.lab.schema.statistics import pareto_front
from bild_lab.lab.store.inputs import require_same_settings
from bild_lab.lab.store.table import write_csv

log = logging.getLogger(__name__)
TABLE, SUMMARY = "screen.csv", "screen.json"
# keys of a setting that may differ between the rows of a table: which texts were decoded, as they
# have their own front, the seed of resampling, and how often live points are timed
MAY_DIFFER = (
    "split",
    "n_examples",
    "data",
    "seed",
    "repeats",
    "warmup",
    "precision",
    "most_repeats",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A screened point. confirmed: the hash of the point that was measured live, empty without one.
    certified: what is. data: the hash of the texts and their references. code: that of the code
    that the policy reaches.

    predicted_speedup: None where nothing was timed; such points have no front. non_inferiority_…:
    as in `sweep.csv`, None without `measure.margin`.
    """

    policy: str
    knobs: Mapping[str, Any]
    split: str
    n_examples: int
    data: str
    quality: float
    quality_low: float
    quality_high: float
    quality_difference: float
    predicted_speedup: float | None
    tokens_per_target_call: float
    target_calls: int
    draft_calls: int
    acceptance_rate: float | None
    on_front: bool = False
    confirmed: str = ""
    quality_metric: str
    quality_difference_low: float
    quality_difference_high: float
    tokens: int
    drafted: int
    accepted: int
    fallbacks: int
    rollbacks: int
    certified: str = ""
    code: str = ""
    non_inferiority_margin: float | None = None
    non_inferiority_lower_bound: float | None = None
    non_inferiority_p_value: float | None = None

    def to_columns(self) -> dict[str, Any]:
        """A flat row."""
        fields = {
            name: value for name, value in vars(self).items() if name not in ("policy", "knobs")
        }
        return {"policy": self.policy, **knob_columns(self.knobs, fields), **fields}


def with_front(rows: Sequence[Row]) -> list[Row]:
    """The rows with `on_front`: no other is at least as fast and better, or as good and faster."""
    front = on_front([(row.predicted_speedup, row.quality) for row in rows])
    return [replace(row, on_front=place in front) for place, row in enumerate(rows)]


def on_front(points: Sequence[tuple[float | None, float]]) -> set[int]:
    """The places of the front's points, given as speedup and quality.

    Those without a speedup are on none.
    """
    known = [place for place, (speedup, _) in enumerate(points) if speedup is not None]
    return {
        known[at]
        for at in pareto_front([(1 / points[place][0], points[place][1]) for place in known])
    }


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write `screen.csv` anew, with the rows of earlier commands that are not among these, but for
    those of a policy whose code has changed since.

    The front is that of all rows of a split and its number of examples.
    """
    file, table = folder / TABLE, pd.DataFrame([row.to_columns() for row in rows])
    if file.is_file():
        earlier, code_now = read_table(file), {row.policy: str(row.code) for row in rows}
        expected = earlier.policy.map(code_now).fillna(earlier.code)
        stale = earlier.code != expected
        if stale.any():
            log.warning(
                f"{file} no longer has {counted(int(stale.sum()), 'point')} that other code of the"
                " policy decoded; screen them again"
            )
        table = pd.concat([earlier[~stale], table], ignore_index=True)
    fixed = list(Row.__dataclass_fields__)[2:]
    knobs = [name for name in table if name not in ("policy", *fixed)]
    point_keys = (
        table[["policy", *knobs, "split", "n_examples"]].map(plain_text).agg(" ".join, axis=1)
    )
    table = table[~point_keys.duplicated(keep="last")].copy()
    for _, group in table.groupby(["split", "n_examples"]):
        speeds = [None if pd.isna(speedup) else speedup for speedup in group.predicted_speedup]
        front = on_front(list(zip(speeds, group.quality, strict=True)))
        table.loc[group.index, "on_front"] = [place in front for place in range(len(group))]
    write_csv(file, table[["policy", *knobs, *fixed]])


def read_table(file: Path) -> pd.DataFrame:
    """The table as it was written."""
    # a hash may look like a number
    return pd.read_csv(file, dtype={"confirmed": str, "data": str, "code": str})


def plain_text(value: Any) -> str:
    """A value as text, the same before and after a file: 2.0 as 2, and nothing for None."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    try:
        return str(value) if isinstance(value, bool | np.bool_) else repr(float(value))
    except (TypeError, ValueError):
        return str(value)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `screen.json`, with the relative errors of the speedups that were predicted of
    confirmed points.

    These are predicted for the texts that the points were measured on.
    """
    errors = [
        abs(confirmed_point["predicted_speedup"] / confirmed_point["speedup"] - 1)
        for confirmed_point in summary["confirmed"]
    ]
    errors_summary = {
        "prediction_error_median": median(errors) if errors else None,
        "prediction_error_largest": max(errors, default=None),
    }
    write_json(folder / SUMMARY, {**summary, **errors_summary})


def contents_of_summary(folder: Path) -> dict[str, str]:
    """The contents that the rows of a folder were decoded with; none without a screening."""
    file = folder / SUMMARY
    return json.loads(file.read_text(encoding="utf-8"))["contents"] if file.is_file() else {}


def require_comparable_rows(
    folder: Path, setting: Mapping[str, Any], contents: Mapping[str, str] | None = None
) -> None:
    """Raise UserError if rows of this setting are not comparable with those of the folder's table:
    they would be mixed.

    contents: of drafters and of files that knobs name, by path. Another split or number of examples
    is comparable, other texts of the same number are not.
    """
    table, summary = folder / TABLE, folder / SUMMARY
    remedy = f"choose another name=NAME, or remove {folder}"
    if summary.is_file():
        earlier = json.loads(summary.read_text(encoding="utf-8"))["setting"]
        require_same_settings(folder, "a screening", earlier, setting, MAY_DIFFER)
    earlier_contents = contents_of_summary(folder)
    for path, content in (contents or {}).items():
        if earlier_contents.get(path, content) != content:
            raise UserError(
                f"{table} was screened before {path} changed, and would mix both; {remedy}"
            )
    if table.is_file():
        rows, split, count = read_table(table), setting["split"], setting["n_examples"]
        of_same_number = rows[(rows.split == split) & (rows.n_examples == count)]
        if set(of_same_number.data) - {setting["data"]}:
            raise UserError(
                f"{table} was screened on {count:,} other texts of {split} than this command has;"
                f" {remedy}"
            )
