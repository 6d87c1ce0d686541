"""Quality against latency, of one setting or of several in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

from bild_lab.lab.formatting import MINUS, TIMES, number, point_label
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.result import Result
from bild_lab.report.axes import front_corners, log_ticks, speedups_on_axis
from bild_lab.report.bars import Limits, cut_at, with_bars
from bild_lab.report.overlay import Overlay
from bild_lab.report.page.interactive import hover_text
from bild_lab.report.page.plots import Figure, Trace, figure_of
from bild_lab.report.page.tables import name_of
from bild_lab.report.style import COLOURS, MUTED, Mark

FRONT = "front"  # the `name` of the numbers of the front
OTHERS = "others"  # the `meta` of traces that the page shows on demand: the bars of points that are not selected
_HOVER = "%{text}<extra></extra>"
_ARROWS = {"left": "triangle-left", "right": "triangle-right", "down": "triangle-down", "up": "triangle-up"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star")
_NONE = "rgba(0,0,0,0)"


@dataclass(frozen=True)
class _Series:
    """Points that are drawn alike. barred: those whose bars are drawn at first."""

    group: Group
    results: Sequence[Result]
    barred: Sequence[Result]
    name: str
    colour: str
    symbol: str


def pareto_figure(group: Group, colours: dict[str, Mark]) -> Figure:
    """Draw the points of a setting. Marks of the front have their place in it, from 1, as in the list beside it."""
    barred = with_bars(group)
    series = [
        _Series(group, group.of_policy(name), barred, escape(name), colours[name].colour, colours[name].plotly_symbol)
        for name in group.policies
    ]
    figure = _figure(group, [_front_line(group, MUTED, "Pareto front"), *_drawn(group, series)])
    figure["layout"].setdefault("annotations", []).extend(_front_numbers(group))
    return figure


def overlay_figure(overlay: Overlay) -> Figure:
    """Draw several settings in one picture: a colour for each setting, a symbol for each policy."""
    whole = overlay.whole
    policies = sorted({policy for part in overlay.parts for policy in part.group.policies})
    symbols = dict(zip(policies, cycle(_SYMBOLS), strict=False))
    traces = []
    for part, colour in zip(overlay.parts, cycle(COLOURS), strict=False):
        label, group = escape(part.label), part.group
        series = [
            _Series(
                group,
                group.of_policy(policy),
                group.front(),
                f"{escape(policy)}, {label}" if len(policies) > 1 else label,
                colour,
                symbols[policy],
            )
            for policy in group.policies
        ]
        traces += [_front_line(group, colour, None), *_drawn(whole, series)]
        if part.baseline_s is not None and group.baseline_quality is not None:
            name = f"{group.setting.baseline}, {part.label}"
            traces.append(_baseline(part.baseline_s, group.baseline_quality, colour, name, f"<b>{escape(name)}</b>"))
    return _figure(whole, traces)


def _figure(group: Group, traces: list[Trace]) -> Figure:
    """The traces with axes, and the baseline where latencies are relative to it."""
    horizontal, vertical = group.limits()
    unit = f"relative to {escape(group.setting.baseline)}" if group.relative else "in seconds"
    layout = {
        "xaxis": {"title": f"Latency per example, {unit} (further left is faster)", "range": horizontal},
        "yaxis": {"title": escape(group.metric), "range": vertical},
    }
    if group.wide:
        ends = [math.log10(end) for end in horizontal]
        layout["xaxis"] |= {"tickvals": log_ticks(*horizontal), "type": "log", "range": ends}
    if group.relative and (quality := group.baseline_quality) is not None:
        own = next((result for result in group.results if result.is_baseline), None)
        name = escape(group.setting.baseline)
        text = f"<b>{name}</b><br>{escape(group.metric)}: {number(quality)}" if own is None else hover_text(own)
        traces.append(_baseline(1.0, quality, MUTED, group.setting.baseline, text, own))
        traces.append({"type": "scatter", "x": [None], "y": [None], "xaxis": "x2", "showlegend": False})
        layout |= {"xaxis2": _speedup_axis(group), **_baseline_lines(name, quality)}
    return figure_of([trace for trace in traces if trace["x"]], layout, height=520)


def _drawn(whole: Group, series: Sequence[_Series]) -> list[Trace]:
    limits = whole.limits()
    return [trace for each in series for trace in _traces(each, limits)]


def _traces(series: _Series, limits: Limits) -> list[Trace]:
    """Marks with their bars, the arrows of bars that are cut, and both for the points that have none at first."""
    placed = [(one, at) for one in series.results if (at := series.group.position(one)) is not None]
    chosen = {id(result) for result in series.barred}
    front = {id(result) for result in series.group.front()}
    barred = [(one, at) for one, at in placed if id(one) in chosen]
    others = [(one, at) for one, at in placed if id(one) not in chosen]
    named = {"name": series.name, "legendgroup": series.name}
    marks = {
        "type": "scatter",
        "mode": "markers",
        **named,
        "x": [at.x for _, at in placed],
        "y": [at.y for _, at in placed],
        "text": [hover_text(one) for one, _ in placed],
        "hovertemplate": _HOVER,
        "customdata": [name_of(one) for one, _ in placed],
        "marker": {
            "symbol": series.symbol,
            "size": 10,
            "color": [series.colour if id(one) in front else _NONE for one, _ in placed],
            "line": {"color": series.colour, "width": 2},
        },
    }
    hidden = {**named, "showlegend": False}
    shown = [*_bars(series, barred, limits, hidden), marks]
    return [*shown, *_bars(series, others, limits, {**hidden, "visible": False, "meta": OTHERS})]


def _bars(series: _Series, placed: Sequence[tuple], limits: Limits, look: Trace) -> list[Trace]:
    """The bars of these points as one trace, and an arrow at each end that the axes cut off as another."""
    found = [cut_at(at, limits) for _, at in placed]
    insides = [inside for inside, _ in found]
    across = [(at.x_high - at.x, at.x - at.x_low) for at in insides]
    along = [(at.y_high - at.y, at.y - at.y_low) for at in insides]
    bars = {
        "type": "scatter",
        "mode": "markers",
        "hoverinfo": "skip",
        "x": [at.x for at in insides],
        "y": [at.y for at in insides],
        "marker": {"size": 1, "color": series.colour},
        "error_x": _error(across, series.colour),
        "error_y": _error(along, series.colour),
        **look,
    }
    cuts = [(one, cut) for (one, _), (_, several) in zip(placed, found, strict=True) for cut in several]
    arrows = {
        "type": "scatter",
        "mode": "markers",
        "cliponaxis": False,
        "x": [cut.x for _, cut in cuts],
        "y": [cut.y for _, cut in cuts],
        "text": [_reaching(series.group, one, cut.end) for one, cut in cuts],
        "hovertemplate": _HOVER,
        "customdata": [name_of(one) for one, _ in cuts],
        "marker": {"symbol": [_ARROWS[cut.direction] for _, cut in cuts], "size": 11, "color": series.colour},
        **look,
    }
    return [trace for trace in (bars, arrows) if trace["x"]]


def _error(ends: Sequence[tuple[float, float]], colour: str) -> dict:
    """Bars that reach so far above and below their values."""
    above, below = zip(*ends, strict=True) if ends else ((), ())
    look = {"type": "data", "symmetric": False, "thickness": 1.1, "width": 0, "color": colour}
    return {**look, "array": list(above), "arrayminus": list(below)}


def _reaching(group: Group, result: Result, end: float) -> str:
    return f"{escape(point_label(result, group.knobs(result)))}<br>the interval reaches {number(end)}"


def _front_line(group: Group, colour: str, name: str | None) -> Trace:
    corners = front_corners(group)
    xs, ys = zip(*corners, strict=True) if len(corners) > 1 else ([], [])
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(xs),
        "y": list(ys),
        "line": {"shape": "hv", "color": colour, "width": 2 if name else 1.2},
        "name": name,
        "showlegend": name is not None,
        "hoverinfo": "skip",
    }


def _front_numbers(group: Group) -> list[dict]:
    """The place of each point in the front, beside its mark."""
    across = math.log10 if group.wide else float
    positions = [group.position(result) for result in group.front()]
    look = {"name": FRONT, "showarrow": False, "xshift": -12, "yshift": -12}
    return [
        {**look, "x": across(at.x), "y": at.y, "text": f"<b>{place}</b>"} for place, at in enumerate(positions, start=1)
    ]


def _baseline(x: float, y: float, colour: str, name: str, text: str, own: Result | None = None) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x],
        "y": [y],
        "name": escape(name),
        "marker": {"symbol": "x-thin", "size": 13, "line": {"width": 3.5, "color": colour}},
        "text": [text],
        "hovertemplate": _HOVER,
        "customdata": [None if own is None else name_of(own)],
    }


def _baseline_lines(name: str, quality: float) -> dict:
    """The baseline's quality, and the one a point lower, as lines with their names."""
    levels = ((quality, name, "solid"), (quality - 1, f"{MINUS}1 point", "dash"))
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "layer": "below"}
    at = {"xref": "paper", "x": 1, "xanchor": "left", "xshift": 6, "showarrow": False, "font": {"color": MUTED}}
    return {
        "shapes": [
            {**across, "y0": level, "y1": level, "line": {"color": MUTED, "width": 1, "dash": dash}}
            for level, _, dash in levels
        ],
        "annotations": [{**at, "y": level, "text": label} for level, label, _ in levels],
    }


def _speedup_axis(group: Group) -> dict:
    """An axis of speedups, one over the latency, above the plot. It is drawn only if a trace uses it."""
    ticks = speedups_on_axis(group)
    return {
        "overlaying": "x",
        "matches": "x",
        "side": "top",
        "type": "log" if group.wide else "linear",
        "title": "Speedup",
        "tickvals": [1 / tick for tick in ticks],
        "ticktext": [f"{tick:g}{TIMES}" for tick in ticks],
        "showgrid": False,
    }
