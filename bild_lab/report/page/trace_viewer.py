"""The trace viewer of the report: every traced text token by token, coloured by who produced it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from bild_lab.lab.formatting import point_label
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.report.page.tables import name_of

MOST_EXAMPLES = 20  # per point, to keep the page small
THRESHOLDS = ("fallback", "rollback", "window")


def viewer_data(group: Group, stored: Mapping[str, Sequence[MeasuredExample]]) -> list[dict[str, Any]]:
    """Return what the viewer shows of a setting: the selected points that have traced texts, fastest first.

    stored: the examples of each selected point, by its name.
    """
    shown = []
    for result in group.selected():
        traced = [one for one in stored[name_of(result)] if one.pieces and one.rounds]
        if traced:
            thresholds = {knob: result.knobs[knob] for knob in THRESHOLDS if knob in result.knobs}
            label = point_label(result, group.knobs(result))
            examples = [_text(one) for one in traced[:MOST_EXAMPLES]]
            shown.append({"point": name_of(result), "label": label, "thresholds": thresholds, "examples": examples})
    return shown


def _text(example: MeasuredExample) -> dict[str, Any]:
    """Return one text: its rounds with the tokens that each added, and its spans in milliseconds."""
    tokens = iter(example.token_ids)
    rounds = []
    for one in example.rounds:
        kept = list(islice(tokens, one.accepted))
        chain = one.drafted[: len(kept)] == kept
        own = (
            next(tokens, None) if one.next_token is not None else None
        )  # None also if the text was cut before this token
        rounds.append(
            {
                "kept": kept,
                "own": own,
                "dropped": one.drafted[one.accepted :] if chain else [],
                "tree": [] if chain else one.drafted,
                "fallback": one.fallback,
                "confidence": one.statistics.get("confidence", []),
                "distance": one.statistics.get("distance", []),
            }
        )
    spans = [[stage, round(1000 * start, 3), round(1000 * end, 3)] for stage, start, end in example.spans]
    return {
        "id": example.id,
        "prompt": example.prompt,
        "pieces": example.pieces,
        "rounds": rounds,
        "spans": spans,
    }
