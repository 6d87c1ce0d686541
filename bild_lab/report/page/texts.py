"""The example browser of the report: source, reference, the target's text and each point's, where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from statistics import median
from typing import Any

from bild_lab.lab.data.examples import Example
from bild_lab.lab.formatting import point_label
from bild_lab.lab.results.commits import examples_of
from bild_lab.lab.results.groups import Group, setting_title
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.report.page.tables import name_of

MOST_CHARACTERS = 300_000  # of all texts of a setting, to keep the page small
Key = tuple[str, int]


def text_browser(group: Group, stored: Mapping[str, Sequence[MeasuredExample]]) -> dict[str, Any] | None:
    """Return what the browser shows of a setting: the selected points with the baseline's text beside theirs.

    An example has its distinct texts, with the share of words that differ from the baseline's text; a point has the
    place of its text among them and its speedup there. Examples whose texts differ most come first, as many as
    `MOST_CHARACTERS` allow. stored: the examples of each selected point, by its
    name. None if no text was stored beside a
    baseline's.
    """
    measured = {
        name_of(result): {one.key: one for one in examples}
        for result in group.selected()
        if not result.is_baseline
        if (examples := [one for one in stored[name_of(result)] if one.baseline_prediction is not None])
    }
    if not measured:
        return None
    labels = {name_of(one): point_label(one, group.knobs(one)) for one in group.results if name_of(one) in measured}
    known, missing = examples_of([one for one in group.results if one.folder is not None])
    keys = list(dict.fromkeys(key for examples in measured.values() for key in examples))
    rows = [_row(place, key, measured, (known or {}).get(key)) for place, key in enumerate(keys)]
    shown = _within(sorted(rows, key=lambda row: -max(row["changes"])))
    return {
        "title": setting_title(group.setting),
        "baseline": str(group.setting.baseline),
        "missing": missing,
        "count": len(rows),
        "points": [{"point": name, "label": labels[name]} for name in measured],
        "examples": shown,
    }


def _row(place: int, key: Key, measured: Mapping[str, Mapping[Key, MeasuredExample]], known: Example | None) -> dict:
    """One example. of: for each point, the place of its text, or None if it has none."""
    own = [examples.get(key) for examples in measured.values()]
    first = next(one for one in own if one is not None)
    target = first.baseline_prediction or ""
    texts = list(dict.fromkeys(one.prediction for one in own if one is not None))
    return {
        "id": f"{key[0]}" if key[1] == 1 else f"{key[0]}, turn {key[1]}",
        "place": place,
        "source": known.source if known is not None else first.prompt,
        "references": list(known.references) if known is not None else [],
        "target": target,
        "texts": texts,
        "changes": [change(target, text) for text in texts],
        "of": [None if one is None else texts.index(one.prediction) for one in own],
        "speedups": [None if one is None else _speedup(one) for one in own],
    }


def change(before: str, after: str) -> float:
    """The share of words that differ, from 0 for equal texts to 1 for texts with no common word."""
    if before == after:
        return 0.0
    words = before.split(), after.split()
    if words[0] == words[1]:  # only spaces differ
        return 0.0
    return round(1 - SequenceMatcher(None, *words, autojunk=False).ratio(), 4)


def _speedup(one: MeasuredExample) -> float | None:
    if not one.baseline_latency_s or not (own := median(one.latency_s)):
        return None
    return round(median(one.baseline_latency_s) / own, 3)


def _within(rows: Sequence[dict]) -> list[dict]:
    """The first rows, as long as their texts are not longer than `MOST_CHARACTERS`; at least one."""
    kept, left = [], MOST_CHARACTERS
    for row in rows:
        left -= len(row["source"] or "") + len(row["target"]) + sum(map(len, [*row["references"], *row["texts"]]))
        if kept and left < 0:
            break
        kept.append(row)
    return kept
