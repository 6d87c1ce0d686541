"""Points over the values of their knobs: maps of two knobs, and the grid of points that were
screened.

Where other knobs have several values too, a map has a dropdown. Its cells are marks, as the basic
bundle of plotly.js has no heat maps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bild_lab.lab.schema.formatting import (
    INFINITY,
    interval,
    number,
    point_label,
    short_value,
    signed,
    times,
)
from bild_lab.lab.schema.numbers import MetricScale, scale_of
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import TOLERANCE
from bild_lab.lab.store.groups import Group, telling_knobs, varying_knobs
from bild_lab.report.page.base import HOVER, Figure, Trace, error_bars, escape, figure_of, scatter
from bild_lab.report.screened_points import ScreenedPoint
from bild_lab.report.style import COLOURS, MUTED, Mark
from bild_lab.report.tables import Table, TableCell, folder_name, plain_table

LOSSES = (0.0, 0.5, 1.0, 2.0)  # how many small losses the fastest screened points may lose
# pixels of a map: a row of it on a narrow screen, a square at most, its letters, a square without
_ROW, _SQUARE, _LETTERS, _TOO_SMALL = 390.0, 40.0, 12.5, 24.0


@dataclass(frozen=True)
class MapPoint:
    """A point of a map. knobs: their values in words. numbers: its speed and its quality. name: of
    its folder, None if it was not measured.
    """

    knobs: Mapping[str, str]
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
            cells.append(MapPoint(_in_words(result, knobs, results), numbers, folder_name(result)))
        maps += _maps(policy, cells, titles, group.scale, group.relative)
    return maps


def _in_words(point: Any, knobs: Sequence[str], points: Sequence[Any]) -> dict[str, str]:
    """The values of a point's knobs, told from those of the others."""
    return {
        knob: short_value(point.knobs.get(knob), (other.knobs.get(knob) for other in points))
        for knob in knobs
    }


def _maps(
    policy: str,
    cells: Sequence[MapPoint],
    titles: tuple[str, str],
    scale: MetricScale,
    relative: bool,
) -> list[Figure]:
    """A map of each number over the first two knobs; none for fewer knobs. scale: of the second
    number. relative: whether that may be < 0.
    """
    knobs = list(cells[0].knobs) if cells else []
    if len(knobs) < 2:
        return []
    axes = {knob: _in_order([cell.knobs[knob] for cell in cells]) for knob in knobs[:2]}
    # more values go up: the figure is as high as they need, and no wider than the page
    axes = dict(sorted(axes.items(), key=lambda axis: len(axis[1])))
    by_choice: dict[str, list[MapPoint]] = {}  # by the values of the other knobs
    for cell in cells:
        choice = ", ".join(f"{knob} {cell.knobs[knob]}" for knob in knobs[2:])
        by_choice.setdefault(escape(choice), []).append(cell)
    figures = []
    for index, (title, digits) in enumerate(zip(titles, (2, scale.digits), strict=True)):
        bounds = _bounds(cells, index, from_zero=relative and index > 0)
        traces = [
            _squares(choice_cells, index, axes, bounds, digits)
            for choice_cells in by_choice.values()
        ]
        for hidden in traces[1:]:
            hidden["visible"] = False
        layout = _map_layout(f"{escape(policy)}: {escape(title)}", list(by_choice), axes)
        height = 150 + 44 * max(map(len, axes.values()))
        figures.append(figure_of(traces, layout, height=height))
    return figures


def _bounds(cells: Sequence[MapPoint], index: int, from_zero: bool) -> tuple[float, float]:
    """The least and the largest size of a number; 0 and 1 where it is not known of any cell."""
    sizes = [abs(cell.numbers[index]) for cell in cells if cell.numbers[index] is not None]
    if not sizes:
        return 0.0, 1.0
    return 0.0 if from_zero else min(sizes), max(sizes)


def _map_layout(
    title: str, choices: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Title and axes of a map, and its dropdown where there are several choices."""
    buttons = [
        {
            "label": label,
            "method": "restyle",
            "args": ["visible", [choice == label for choice in choices]],
        }
        for label in choices
    ]
    # both by pixels from the top, however high the figure is
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    menu |= {"pad": {"b": 2}}
    above = {"x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 4}}
    layout = {
        "title": {"text": title, "font": {"size": 14}, **above},
        "showlegend": False,
        "updatemenus": [menu] if len(choices) > 1 else [],
    }
    for axis, (knob, knob_texts) in zip("xy", axes.items(), strict=True):
        layout[f"{axis}axis"] = {
            "title": escape(knob),
            "range": [-0.6, len(knob_texts) - 0.4],
            "showgrid": False,
            "tickvals": list(range(len(knob_texts))),
            "ticktext": [escape(knob_text) for knob_text in knob_texts],
        }
    return layout


def _squares(
    cells: Sequence[MapPoint],
    index: int,
    axes: Mapping[str, list[str]],
    bounds: tuple[float, float],
    digits: int,
) -> Trace:
    """The cells as squares, in stronger colour the larger their number. Where a row has too many
    squares for letters in them, a mouse over one shows its number.

    index: of the number. bounds: its least and its largest size. digits: as in `MetricScale`.
    """
    known = [cell for cell in cells if cell.numbers[index] is not None]
    smallest, largest = bounds
    write = signed if smallest == 0 else number
    places, texts, colours, opacities = [], [], [], []
    for cell in known:
        value = cell.numbers[index]
        places.append([knob_texts.index(cell.knobs[knob]) for knob, knob_texts in axes.items()])
        texts.append(write(value, digits) + ("<br>✓" if cell.certified else ""))
        colours.append(COLOURS[1] if value < 0 else COLOURS[0])
        share = (abs(value) - smallest) / ((largest - smallest) or 1.0)
        opacities.append(round(0.08 + 0.6 * share, 3))
    columns = min(map(len, axes.values()))
    size = min(_SQUARE, _ROW / columns)
    return scatter(
        places,
        "markers" if size < _TOO_SMALL else "markers+text",
        text=texts,
        textfont={"size": _LETTERS * size / _SQUARE},
        customdata=[cell.name for cell in known],
        hoverinfo="text",
        marker={"symbol": "square", "size": size, "color": colours, "opacity": opacities},
    )


def _in_order(texts: Sequence[str]) -> list[str]:
    """The texts of a knob's values, numbers by size and before words."""

    def is_word_then_size(text: str) -> tuple[bool, float, str]:
        try:
            return False, math.inf if text == INFINITY else float(text), text
        except ValueError:
            return True, 0.0, text

    return sorted(set(texts), key=is_word_then_size)


def grids(points: Sequence[ScreenedPoint], colours: Mapping[str, Mark]) -> list[ScreenedGrid]:
    """What the page shows of screened points."""
    sets: dict[tuple[str, int], list[ScreenedPoint]] = {}
    for point in points:
        sets.setdefault((point.row["split"], point.row["n_examples"]), []).append(point)
    screened_grids = []
    for (split, examples), grid_points in sets.items():
        maps = []
        for policy in dict.fromkeys(point.policy for point in grid_points):
            maps += _screened_maps(
                policy, [point for point in grid_points if point.policy == policy]
            )
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


def _screened_maps(policy: str, points: Sequence[ScreenedPoint]) -> list[Figure]:
    """The maps of one policy's screened points."""
    titles = ("predicted speedup", f"{points[0].row['quality_metric']}, difference")
    knobs = varying_knobs(points)
    cells = [
        MapPoint(
            knobs=_in_words(point, knobs, points),
            numbers=(point.speedup, point.difference),
            name=None if point.live is None else folder_name(point.live),
            certified=bool(point.certified),
        )
        for point in points
    ]
    scale = scale_of(points[0].row["quality_metric"])
    return _maps(policy, cells, titles, scale, relative=True)


def _cloud(points: Sequence[ScreenedPoint], colours: Mapping[str, Mark]) -> Figure:
    """Predicted latency and loss of every screened point, with their front; diamonds were measured
    live.
    """
    metric = escape(points[0].row["quality_metric"])
    traces = []
    for policy in dict.fromkeys(point.policy for point in points):
        traces += _policy_cloud(
            policy, [point for point in points if point.policy == policy], colours[policy]
        )
    front = sorted((point.latency, point.difference) for point in points if point.row["on_front"])
    line = {"shape": "hv", "color": MUTED}
    traces.append(scatter(front, "lines", name="front", hoverinfo="skip", line=line))
    for certificate in dict.fromkeys(point.certified for point in points if point.certified):
        certified = [point for point in points if point.certified == certificate]
        traces.append(
            scatter(
                _cloud_places(certified),
                "markers",
                name=f"certified: {escape(certificate)}",
                marker={
                    "symbol": "circle-open",
                    "size": 14,
                    "color": COLOURS[5],
                    "line": {"width": 2},
                },
                hoverinfo="skip",
            )
        )
    layout = {
        "xaxis": {
            "title": "Predicted latency, relative to the baseline<br>(further left is faster)"
        },
        "yaxis": {"title": f"{metric}, difference", "zeroline": True, "zerolinecolor": MUTED},
    }
    return figure_of(traces, layout, height=480)


def _policy_cloud(policy: str, points: Sequence[ScreenedPoint], mark: Mark) -> list[Trace]:
    """One policy's screened points, and those of them that were measured live."""
    screened = scatter(
        _cloud_places(points),
        "markers",
        name=escape(policy),
        marker={"color": mark.colour, "size": 6, "symbol": mark.plotly_symbol},
        text=[_hover(point) for point in points],
        hovertemplate=HOVER,
    )
    live = [point.live for point in points if point.live is not None]
    compared = [result for result in live if result.speedup.low is not None]
    return [screened, _confirmed(policy, compared, mark.colour)] if compared else [screened]


def _cloud_places(points: Sequence[ScreenedPoint]) -> list[tuple[float, float]]:
    return [(point.latency, point.difference) for point in points]


def _hover(point: ScreenedPoint) -> str:
    row = point.row
    digits = scale_of(row["quality_metric"]).digits
    metric = f"{escape(row['quality_metric'])} {number(row['quality'], digits)}"
    low, high = row["quality_difference_low"], row["quality_difference_high"]
    bounds = interval(low, high, digits, signed)
    tokens_per_call = number(row["tokens_per_target_call"])
    lines = [
        f"<b>{escape(point_label(point, list(point.knobs)))}</b>",
        f"predicted {times(point.speedup)}",
        f"{metric}, {signed(point.difference, digits)} {bounds}",
        f"{tokens_per_call} tokens a call, {row['target_calls']} target calls",
        f"{row['fallbacks']} fallbacks, {row['rollbacks']} rollbacks",
    ]
    return "<br>".join(lines)


def _confirmed(policy: str, results: Sequence[Result], colour: str) -> Trace:
    """What was measured live, with its intervals; a click opens the point."""
    known = [result for result in results if result.quality.difference_low is not None]
    places, latency_ends, difference_ends, texts = [], [], [], []
    for result in known:
        speedup, quality = result.speedup, result.quality
        latency = 1 / speedup.value
        places.append((latency, quality.difference))
        latency_ends.append((1 / speedup.high, latency, 1 / speedup.low))
        difference_ends.append(
            (quality.difference_low, quality.difference, quality.difference_high)
        )
        label = point_label(result, list(result.knobs))
        texts.append(f"{escape(label)}<br>measured {times(speedup.value)}")
    return scatter(
        places,
        "markers",
        name=f"{escape(policy)}, measured",
        marker={"symbol": "diamond", "size": 11, "color": colour},
        error_x=error_bars(latency_ends, colour),
        error_y=error_bars(difference_ends, colour),
        text=texts,
        hovertemplate=HOVER,
        customdata=[folder_name(result) for result in known],
    )


def _fastest(points: Sequence[ScreenedPoint]) -> Table:
    """The fastest screened point within each allowed loss."""
    rows = []
    scale = scale_of(points[0].row["quality_metric"])
    for loss in (scale.small_loss * share for share in LOSSES):
        allowed = [point for point in points if point.difference >= -loss - TOLERANCE]
        if not allowed:
            continue
        best = max(allowed, key=lambda point: point.speedup)
        measured = TableCell("not confirmed")
        if best.live is not None:
            measured = TableCell(times(best.live.speedup.value), "", best.live.speedup.value)
        rows.append(
            {
                "allowed loss": TableCell(number(loss, scale.digits - 1), "", loss),
                "predicted": TableCell(times(best.speedup), "", best.speedup),
                "difference": TableCell(signed(best.difference, scale.digits), "", best.difference),
                "measured": measured,
                "policy, knobs": point_label(best, telling_knobs(points)(best), points),
            }
        )
    return plain_table(rows)
