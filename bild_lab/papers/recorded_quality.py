"""Points whose quality a screening decoded on every example, and whose speed a sweep measured on
the first few (`recorded_steps.py`).

Both are joined by policy, knobs, models and data. The texts of the timed examples were decoded both
ways, live and over the record, so they are compared.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.formatting import counted, number_range
from bild_lab.lab.schema.numbers import Quality
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import varying_keys
from bild_lab.papers.runs.recorded_steps import PREFIX
from bild_lab.screening.rows import SUMMARY, TABLE, plain_text
from bild_lab.screening.text_log import FOLDER as TEXTS
from bild_lab.screening.text_log import TokenIds, texts_of_points

FACT = "recorded"  # of a point's facts: how its quality was decoded
# what decides about a text, of a point's setting
DECIDING = (
    "weights", "weight_bits", "draft", "draft_weight_bits", "dtype", "engine", "device", "device_map",
    "dataset", "split", "prompt_template", "chat_template", "max_source_tokens", "metric",
    "decoding", "stop", "processors",
)  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """What a screening left in its folder. summary: its `screen.json`."""

    folder: Path
    summary: Mapping[str, Any]

    @property
    def setting(self) -> Mapping[str, Any]:
        """The setting that all its points share."""
        return self.summary["setting"]

    @property
    def count(self) -> int:
        """How many examples it decoded."""
        return self.setting["n_examples"]

    def has_setting_of(self, point: Result) -> bool:
        """Whether it decoded this point's data by the same models in the same way."""
        return set(DECIDING).isdisjoint(varying_keys([self.setting, point.setting]))

    def quality(self, point: Result) -> Quality | None:
        """The quality of this point's policy and knobs; None if they were not screened."""
        row = next((row for row in self._rows if _is_of(row, point)), None)
        if row is None:
            return None
        names = ("value", "low", "high", "difference", "difference_low", "difference_high")
        columns = ("quality", *(f"quality_{name}" for name in names[1:]))
        numbers = {name: float(row[column]) for name, column in zip(names, columns, strict=True)}
        return Quality(
            metric=row["quality_metric"],
            signature=point.quality.signature,
            baseline=numbers["value"] - numbers["difference"],
            **numbers,
        )

    def texts(self, point: Result, count: int) -> dict[int, TokenIds]:
        """The first `count` texts of this point's policy and knobs, by the examples' places."""
        for file, points in self._logs:
            place = next(
                (
                    place
                    for place, logged in enumerate(points)
                    if (logged["policy"], logged["knobs"]) == (point.policy, dict(point.knobs))
                ),
                None,
            )
            if place is not None:
                examples = self._texts_in(file, count)
                return {example: texts[place] for example, texts in examples.items()}
        return {}

    @cached_property
    def _rows(self) -> list[dict[str, str]]:
        with (self.folder / TABLE).open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        examples = (self.setting["split"], str(self.count))
        return [row for row in rows if (row["split"], row["n_examples"]) == examples]

    @cached_property
    def _logs(self) -> list[tuple[Path, list[Mapping[str, Any]]]]:
        """The files of texts, the newest first, each with its points."""
        files = sorted(
            (self.folder / TEXTS).glob("*.jsonl"), key=lambda file: -file.stat().st_mtime_ns
        )
        return [(file, json.loads(_first_line(file))["points"]) for file in files]

    @cached_property
    def _read_texts(self) -> dict[tuple[Path, int], dict[int, list[TokenIds]]]:
        return {}

    def _texts_in(self, file: Path, count: int) -> dict[int, list[TokenIds]]:
        """The first `count` examples' texts of every point, read once."""
        if (file, count) not in self._read_texts:
            self._read_texts[file, count] = dict(texts_of_points(file, count))
        return self._read_texts[file, count]


def _first_line(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.readline()


def _is_of(row: Mapping[str, str], point: Result) -> bool:
    """Whether a row of `screen.csv` has this point's policy and knobs."""
    values = {knob: row.get(f"knob_{knob}", row.get(knob)) for knob in point.knobs}
    return row["policy"] == point.policy and all(
        plain_text(values[knob]) == plain_text(value) for knob, value in point.knobs.items()
    )


def recordings_of(folders: Iterable[Path]) -> list[Recording]:
    """What screenings left beside these folders of sweeps, for their points."""
    files = [
        file
        for folder in folders
        for file in sorted(folder.parent.glob(f"{PREFIX}{folder.name}_*/{SUMMARY}"))
    ]
    return [Recording(file.parent, json.loads(file.read_text(encoding="utf-8"))) for file in files]


def with_recorded_quality(
    points: Sequence[Result], recordings: Sequence[Recording]
) -> list[Result]:
    """The points, with the quality of all examples that a screening decoded where it decoded more
    than the point.

    A screened point has the fact `recorded`.
    """
    return [_joined(point, recordings) for point in points]


def recorded_of(point: Result) -> Mapping[str, Any] | None:
    """How a point was screened; None if it was not.

    examples: of its quality. timed: examples of its speed. compared, differing: texts that were
    decoded both ways, and those of them that differ. ties, defects: among the few texts that the
    screening judged.
    """
    return point.facts.get(FACT)


def _joined(point: Result, recordings: Sequence[Recording]) -> Result:
    """The point with its fact, and the quality of a screening that has more examples."""
    if point.is_baseline:
        return point
    for recording in recordings:
        if recording.has_setting_of(point) and (quality := recording.quality(point)) is not None:
            timed = point.setting.n_examples
            live_texts = [tuple(example.token_ids) for example in read_examples(point.folder)]
            texts = recording.texts(point, len(live_texts))
            fact = {
                "examples": max(recording.count, timed),
                "timed": timed,
                "compared": len(texts),
                "differing": sum(live_texts[place] != text for place, text in texts.items()),
                "ties": recording.summary["replayed_ties"],
                "defects": recording.summary["replayed_defects"],
            }
            more = recording.count > timed
            return replace(
                point,
                quality=quality if more else point.quality,
                facts={**point.facts, FACT: fact},
            )
    return point


def protocol(points: Sequence[Result]) -> str:
    """Which examples the numbers of a figure are of: `quality of all 888 examples over a record,
    speed of the first 200 live`.
    """
    known = [recorded for point in points if (recorded := recorded_of(point))]
    more = [recorded for recorded in known if recorded["examples"] > recorded["timed"]]
    if not more:
        return "quality and speed of the same examples, decoded live"
    examples = number_range((recorded["examples"] for recorded in more), digits=0)
    timed = number_range((recorded["timed"] for recorded in more), digits=0)
    words = f"quality of all {examples} examples over a record, speed of the first {timed} live"
    alone = sum(not point.is_baseline for point in points) - len(more)
    return f"{words}; of {counted(alone, 'point')} both live" if alone else words


def notes(points: Sequence[Result]) -> list[str]:
    """How the points' quality was decoded, and whether texts that were decoded both ways agree."""
    sentences = [f"{protocol(points).capitalize()}."]
    known = [recorded for point in points if (recorded := recorded_of(point))]
    if not known:
        return sentences
    totals = {key: sum(recorded[key] for recorded in known) for key in ("compared", "differing")}
    sentences.append(
        f"Of {totals['compared']:,} timed texts that were decoded over the record too,"
        f" {totals['differing']:,} differ."
    )
    if defects := max(recorded["defects"] for recorded in known):
        sentences.append(
            f"A screening judged {counted(defects, 'text')} a defect of its record: measure these"
            " points with live=true."
        )
    elif totals["differing"]:
        ties = max(recorded["ties"] for recorded in known)
        sentences.append(
            f"Of those that the screenings judged, {ties or 'none'} differ by a tie within rounding,"
            " none by a defect."
        )
    return [" ".join(sentences)]
