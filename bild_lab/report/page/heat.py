"""Heat maps of two knobs: how fast and how good each policy was over the values of its knobs."""

from __future__ import annotations

from typing import Any

from bild_lab.lab.formatting import knob_value
from bild_lab.lab.results.groups import Group, varying_knobs
from bild_lab.lab.schema.result import Result
from bild_lab.report.page.tables import name_of


def heat_maps(group: Group) -> list[dict[str, Any]]:
    """Return what the maps of a setting show: each policy with at least two knobs of several values.

    A knob has its values in order, a point the place of its value among them. colour: "around" for a number whose
    middle is 0, "rising" for others.
    """
    found = []
    for policy in group.policies:
        results = [result for result in group.of_policy(policy) if group.position(result) is not None]
        knobs = [knob for knob in varying_knobs(results) if all(knob in result.knobs for result in results)]
        if len(knobs) < 2:
            continue
        values = {knob: _in_order({knob_value(one.knobs[knob]): one.knobs[knob] for one in results}) for knob in knobs}
        points = [
            {
                "point": name_of(result),
                "at": [values[knob].index(knob_value(result.knobs[knob])) for knob in knobs],
                "values": [_rounded(value) for value in _numbers(group, result)],
            }
            for result in results
        ]
        found.append(
            {
                "policy": policy,
                "knobs": [{"name": knob, "values": texts} for knob, texts in values.items()],
                "shown": [{"title": title, "colour": colour} for title, colour in _titles(group)],
                "points": points,
            }
        )
    return found


def _titles(group: Group) -> list[tuple[str, str]]:
    if group.relative:
        return [("Speedup", "rising"), (f"{group.metric}, difference from {group.setting.baseline}", "around")]
    return [("Latency, ms", "rising"), (group.metric, "rising")]


def _numbers(group: Group, result: Result) -> tuple[float | None, float | None]:
    if group.relative:
        return result.speedup.value, result.quality.difference
    return 1000 * result.latency_s.mean, result.quality.value


def _in_order(values: dict[str, Any]) -> list[str]:
    """The texts of a knob's values, numbers by size."""

    def key(text: str) -> tuple[bool, float, str]:
        try:
            return False, float(values[text]), ""
        except (TypeError, ValueError):
            return True, 0.0, text

    return sorted(values, key=key)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
