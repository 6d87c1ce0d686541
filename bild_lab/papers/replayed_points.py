"""Points that were decoded over a record of distributions, for figures that need texts and counts but no clock."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.schema.numbers import Quality
from bild_lab.lab.schema.result import Setting
from bild_lab.lab.screening.rows import SUMMARY, TABLE


@dataclass(frozen=True)
class Replayed:
    """A screened point, with what a figure reads of a `Result`. rollbacks: drafted tokens that the target replaced."""

    policy: str
    setting: Setting
    quality: Quality
    tokens: int
    rollbacks: int
    is_baseline: bool = False


def read_replayed(folders: Iterable[Path]) -> list[Replayed]:
    """Every screened point of these folders. Raises UserError for files of another form."""
    found: list[Replayed] = []
    for folder in folders:
        if not (folder / TABLE).is_file():
            continue
        try:
            setting = Setting(json.loads((folder / SUMMARY).read_text())["setting"])
            with (folder / TABLE).open(newline="") as stream:
                found += [_replayed(row, setting) for row in csv.DictReader(stream)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} holds no points of scripts/screen.py: {error!r}; make them anew") from error
    return found


def _replayed(row: Mapping[str, str], setting: Setting) -> Replayed:
    value, difference = float(row["quality"]), float(row["quality_difference"])
    return Replayed(
        row["policy"],
        Setting({**setting, "split": row["split"], "n_examples": int(row["n_examples"])}),
        Quality(
            metric=row["quality_metric"],
            value=value,
            low=float(row["quality_low"]),
            high=float(row["quality_high"]),
            baseline=value - difference,
            difference=difference,
            difference_low=float(row["quality_difference_low"]),
            difference_high=float(row["quality_difference_high"]),
        ),
        int(row["tokens"]),
        int(row["rollbacks"]),
    )
