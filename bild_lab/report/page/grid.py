"""Points over the values of their knobs: maps of two knobs, and the grid of points that were
screened.

Where other knobs have several values too, a map has a dropdown. Its cells are marks, as the basic
bundle of plotly.js has no heat maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from bild_lab.lab.schema.formatting import (
    interval,
    knob_value,
    number,
    point_label,
    signed,
    times,
)
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import Group, telling_knobs, varying_knobs
from bild_lab.report.page.base import HOVER, Figure, Trace, error_bars, figure_of, scatter
from bild_lab.report.screened_points import ScreenedPoint
from bild_lab.report.style import COLOURS, MUTED, Mark
from bild_lab.report.tables import Table, TableCell, folder_name, plain_table

LOSSES = (0.0, 0.5, 1.0, 2.0)  # points of quality that the fastest screened points may lose


@dataclass(frozen=True)
class MapPoint:
    """A point of a map. numbers: its speed and its quality. name: of its folder, None if it was not
    measured.
    """

    knobs: Mapping[str, Any]
    numbers: tuple[float | None, float | None]
    name: str | None
    certified: bool = False


@dataclass(frozen=True)
class ScreenedGrid:
    """What the page shows of a split and number of examples that were screened."""

    split: str
    examples: int
    count: int
    cloud: Figure
    fastest: Table
    maps: list[Figure]


def knob_maps(group: Group) -> list[Figure]:
    """The maps of a setting: of each policy with at least two knobs of several values."""
    titles = ("Latency, ms", group.metric)
    if group.relative:
        titles = ("Speedup", f"{group.metric}, difference from {group.setting.baseline}")
    maps = []
    for policy in group.policies:
        results = [
            result for result in group.of_policy(policy) if group.position(result) is not None
        ]
        knobs = [
            knob
            for knob in varying_knobs(results)
            if all(knob in result.knobs for result in results)
        ]
        cells = []
        for result in results:
            numbers = (1000 * result.latency_s.mean, result.quality.value)
            if group.relative:
                numbers = (result.speedup.value, result.quality.difference)
            cells.append(
                MapPoint({knob: result.knobs[knob] for knob in knobs}, numbers, folder_name(result))
            )
        maps += _maps(policy, cells, titles, group.relative)
    return maps


def _maps(
    policy: str, cells: Sequence[MapPoint], titles: tuple[str, str], relative: bool
) -> list[Figure]:
    """A map of each number over the first two knobs; none for fewer knobs. relative: whether the
    second may be < 0.
    """
    knobs = list(cells[0].knobs) if cells else []
    if len(knobs) < 2:
        return []
    axes = {knob: _in_order([cell.knobs[knob] for cell in cells]) for knob in knobs[:2]}
    choices: dict[str, list[MapPoint]] = {}  # by the values of the other knobs
    for cell in cells:
        words = ", ".join(f"{knob} {knob_value(cell.knobs[knob])}" for knob in knobs[2:])
        choices.setdefault(escape(words), []).append(cell)
    figures = []
    for place, title in enumerate(titles):
        values = [abs(cell.numbers[place]) for cell in cells if cell.numbers[place] is not None]
        ends = (0.0 if relative and place else min(values), max(values)) if values else (0.0, 1.0)
        traces = [_squares(choice_cells, place, axes, ends) for choice_cells in choices.values()]
        for hidden in traces[1:]:
            hidden["visible"] = False
        buttons = [
            {
                "label": words,
                "method": "restyle",
                "args": ["visible", [words == choice for choice in choices]],
            }
            for words in choices
        ]
        menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
        layout = {
            "title": {
                "text": f"{escape(policy)}: {escape(title)}",
                "x": 0.01,
                "y": 0.98,
                "font": {"size": 14},
            },
            "showlegend": False,
            "updatemenus": [menu] if len(choices) > 1 else [],
        }
        for axis, (knob, knob_values) in zip("xy", axes.items(), strict=True):
            ticks = {
                "tickvals": list(range(len(knob_values))),
                "ticktext": [escape(knob_text) for knob_text in knob_values],
            }
            place = {"range": [-0.6, len(knob_values) - 0.4], "showgrid": False}
            layout[f"{axis}axis"] = {"title": escape(knob), **place, **ticks}
        figures.append(figure_of(traces, layout, height=150 + 44 * len(axes[knobs[1]])))
    return figures


def _squares(
    cells: Sequence[MapPoint], place: int, axes: Mapping[str, list[str]], ends: tuple[float, float]
) -> dict[str, Any]:
    """The cells as squares, in stronger colour the larger their number; ends: its least and
    most.
    """
    known = [(cell, cell.numbers[place]) for cell in cells if cell.numbers[place] is not None]
    places = [
        [knob_values.index(knob_value(cell.knobs[knob])) for knob, knob_values in axes.items()]
        for cell, _ in known
    ]
    (smallest, largest), written = ends, signed if ends[0] == 0 else number
    strength = [
        round(0.08 + 0.6 * (abs(value) - smallest) / ((largest - smallest) or 1.0), 3)
        for _, value in known
    ]
    colours = [COLOURS[1] if value < 0 else COLOURS[0] for _, value in known]
    return scatter(
        places,
        "markers+text",
        text=[written(value) + "<br>✓" * cell.certified for cell, value in known],
        customdata=[cell.name for cell, _ in known],
        hoverinfo="text",
        marker={"symbol": "square", "size": 40, "color": colours, "opacity": strength},
    )


def _in_order(values: Sequence[Any]) -> list[str]:
    """The texts of a knob's values, numbers by size and before words."""
    texts = pd.Series({knob_value(value): value for value in values}, dtype=object)
    return list(pd.to_numeric(texts, errors="coerce").sort_index().sort_values(kind="stable").index)


def grids(points: Sequence[ScreenedPoint], colours: Mapping[str, Mark]) -> list[ScreenedGrid]:
    """What the page shows of screened points."""
    sets: dict[tuple[str, int], list[ScreenedPoint]] = {}
    for point in points:
        sets.setdefault((point.row["split"], point.row["n_examples"]), []).append(point)
    screened_grids = []
    for (split, examples), grid_points in sets.items():
        titles = ("predicted speedup", f"{grid_points[0].row['quality_metric']}, difference")
        maps = []
        for policy in dict.fromkeys(point.policy for point in grid_points):
            policy_points = [point for point in grid_points if point.policy == policy]
            knobs = varying_knobs(policy_points)
            cells = [
                MapPoint(
                    {knob: point.knobs.get(knob) for knob in knobs},
                    (point.speedup, point.difference),
                    point.live and folder_name(point.live),
                    bool(point.certified),
                )
                for point in policy_points
            ]
            maps += _maps(policy, cells, titles, relative=True)
        screened_grids.append(
            ScreenedGrid(
                split,
                examples,
                len(grid_points),
                _cloud(grid_points, colours),
                _fastest(grid_points),
                maps,
            )
        )
    return screened_grids


def _cloud(points: Sequence[ScreenedPoint], colours: Mapping[str, Mark]) -> Figure:
    """Predicted latency and loss of every screened point, with their front; diamonds were measured
    live.
    """
    metric = escape(points[0].row["quality_metric"])
    traces = []
    for policy in dict.fromkeys(point.policy for point in points):
        policy_points = [point for point in points if point.policy == policy]
        mark = colours[policy]
        look = {"color": mark.colour, "size": 6, "symbol": mark.plotly_symbol}
        text = {"text": [_hover(point) for point in policy_points], "hovertemplate": HOVER}
        places = [(1 / point.speedup, point.difference) for point in policy_points]
        traces.append(scatter(places, "markers", name=escape(policy), marker=look, **text))
        if live := [
            point.live
            for point in policy_points
            if point.live is not None and point.live.speedup.low is not None
        ]:
            traces.append(_confirmed(policy, live, mark.colour))
    front = sorted(
        (1 / point.speedup, point.difference) for point in points if point.row["on_front"]
    )
    traces.append(
        scatter(
            front, "lines", name="front", hoverinfo="skip", line={"shape": "hv", "color": MUTED}
        )
    )
    for words in dict.fromkeys(point.certified for point in points if point.certified):
        ring = {"symbol": "circle-open", "size": 14, "color": COLOURS[5], "line": {"width": 2}}
        places = [
            (1 / point.speedup, point.difference) for point in points if point.certified == words
        ]
        traces.append(
            scatter(
                places, "markers", name=f"certified: {escape(words)}", marker=ring, hoverinfo="skip"
            )
        )
    layout = {
        "xaxis": {
            "title": "Predicted latency, relative to the baseline<br>(further left is faster)"
        },
        "yaxis": {"title": f"{metric}, difference", "zeroline": True, "zerolinecolor": MUTED},
    }
    return figure_of(traces, layout, height=480)


def _hover(point: ScreenedPoint) -> str:
    row = point.row
    bounds = interval(row["quality_difference_low"], row["quality_difference_high"], write=signed)
    lines = [
        f"<b>{escape(point_label(point, list(point.knobs)))}</b>",
        f"predicted {times(point.speedup)}",
        (
            f"{escape(row['quality_metric'])} {number(row['quality'])}, {signed(point.difference)}"
            f" {bounds}"
        ),
        (
            f"{number(row['tokens_per_target_call'])} tokens a call, {row['target_calls']} target"
            " calls"
        ),
        f"{row['fallbacks']} fallbacks, {row['rollbacks']} rollbacks",
    ]
    return "<br>".join(lines)


def _confirmed(policy: str, results: Sequence[Result], colour: str) -> Trace:
    """What was measured live, with its intervals; a click opens the point."""
    known = [
        (result, result.speedup, result.quality)
        for result in results
        if result.quality.difference_low is not None
    ]
    places = [(1 / speedup.value, quality.difference) for _, speedup, quality in known]
    across = [(1 / speedup.high, 1 / speedup.value, 1 / speedup.low) for _, speedup, _ in known]
    along = [
        (quality.difference_low, quality.difference, quality.difference_high)
        for _, _, quality in known
    ]
    words = [
        f"{escape(point_label(result, list(result.knobs)))}<br>measured {times(speedup.value)}"
        for result, speedup, _ in known
    ]
    return scatter(
        places,
        "markers",
        name=f"{escape(policy)}, measured",
        marker={"symbol": "diamond", "size": 11, "color": colour},
        error_x=error_bars(across, colour),
        error_y=error_bars(along, colour),
        text=words,
        hovertemplate=HOVER,
        customdata=[folder_name(result) for result, _, _ in known],
    )


def _fastest(points: Sequence[ScreenedPoint]) -> Table:
    """The fastest screened point within each allowed loss."""
    rows = []
    for loss in LOSSES:
        allowed = [point for point in points if point.difference >= -loss - 1e-9]
        if best := max(allowed, key=lambda point: point.speedup, default=None):
            rows.append(
                {
                    "allowed loss": TableCell(number(loss, 1), "", loss),
                    "predicted": times(best.speedup),
                    "difference": signed(best.difference),
                    "measured": (
                        "not confirmed" if best.live is None else times(best.live.speedup.value)
                    ),
                    "policy, knobs": point_label(best, telling_knobs(best, points)),
                }
            )
    return plain_table(rows)
