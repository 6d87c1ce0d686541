"""The trace viewer of the report: every traced text token by token, coloured by who produced it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from bild_lab.lab.formatting import point_label
from bild_lab.lab.results.groups import Group

MOST_EXAMPLES = 20  # of a point, to keep the page small
THRESHOLDS = ("fallback", "rollback", "window")


def viewer_data(group: Group, rows_of: Callable[[str], Iterable[dict]]) -> list[dict[str, Any]]:
    """What the viewer shows of a setting: the telling points that have traced texts, fastest first.

    rows_of: a point's rows of `examples.jsonl`, by the point's id.
    """
    shown = []
    for result in group.telling():
        examples = [_example(row) for row in rows_of(result["point"]) if row.get("pieces") and row["rounds"]]
        if examples:
            thresholds = {knob: result["knobs"][knob] for knob in THRESHOLDS if knob in result["knobs"]}
            label = point_label(result, group.knobs(result))
            shown.append({"label": label, "thresholds": thresholds, "examples": examples[:MOST_EXAMPLES]})
    return shown


def _example(row: dict) -> dict[str, Any]:
    """One text: its rounds, each with the tokens it gave, and its spans in milliseconds."""
    tokens = iter(row["token_ids"])
    rounds = []
    for one in row["rounds"]:
        kept = list(islice(tokens, one["accepted"]))
        chain = one["drafted"][: len(kept)] == kept
        own = next(tokens, None) if one["next_token"] is not None else None  # or the text was cut before it
        rounds.append(
            {
                "kept": kept,
                "own": own,
                "dropped": one["drafted"][one["accepted"] :] if chain else [],
                "tree": [] if chain else one["drafted"],
                "fallback": one.get("fallback", False),
                "confidence": one.get("confidence", []),
                "distance": one.get("distance", []),
            }
        )
    spans = [[stage, round(1000 * start, 3), round(1000 * end, 3)] for stage, start, end in row.get("spans", ())]
    return {
        "id": row["id"],
        "prompt": row["prompt"],
        "pieces": row["pieces"],
        "rounds": rounds,
        "spans": spans,
    }
