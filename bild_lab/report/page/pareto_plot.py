"""Quality against latency on the page: of one setting, or of several that may be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bild_lab.lab.schema.formatting import (
    MISSING,
    TIMES,
    knob_value,
    number,
    short_name,
    short_value,
)
from bild_lab.lab.schema.numbers import MetricScale
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.lab.store.groups import Group, Position, flat_setting, varying_keys
from bild_lab.lab.store.hashing import plain_numbers
from bild_lab.report.matching import DERIVED_KEYS
from bild_lab.report.page.base import HOVER, Figure, Trace, error_bars, escape, figure_of, scatter
from bild_lab.report.style import (
    MUTED,
    Mark,
    beyond_axis,
    front_corners,
    log_ticks,
    marks,
    speedups_on_axis,
    with_bars,
)
from bild_lab.report.tables import cell_of, folder_name

# what settings must share to be in one picture
_SHARED = (
    "target",
    "weights",
    "dataset",
    "split",
    "data",
    "n_examples",
    "prompt_template",
    "chat_template",
    "max_source_tokens",
    "metric",
    "device",
    "hardware",
)
# what does not change the baseline, so that latencies relative to it can be compared
_BESIDE_THE_BASELINE = (
    "draft",
    "second_draft",
    "draft_revision",
    "second_draft_revision",
    "compile_drafter",
    "repeats",
    "warmup",
)
_LONGEST_LABEL = 40
_HOVER_NUMBERS = (
    "speedup",
    "quality",
    "quality_difference",
    "latency_s_median",
    "tokens_per_s",
    "tokens_per_target_call",
    "acceptance_rate",
    "fallbacks",
    "rollbacks",
    "agreement_with_target",
    "point",
)
_TRANSPARENT = "rgba(0,0,0,0)"
_HIDDEN_BARS = {"name": "bars of the other points", "legendgroup": "bars", "visible": "legendonly"}


@dataclass(frozen=True)
class OverlaySetting:
    """A setting in a picture of several.

    number: of the setting on the page, from 1. baseline_s: its baseline's mean latency, if drawn.
    """

    number: int
    label: str
    group: Group
    baseline_s: float | None


@dataclass(frozen=True)
class Overlay:
    """Settings that may be compared.

    all_points: those of all settings. differing: the keys of the setting that differ.
    """

    settings: list[OverlaySetting]
    all_points: Group
    differing: list[str]


def overlays(groups: Sequence[Group]) -> list[Overlay]:
    """A picture for each set of several settings that share target, data and machine.

    Latencies are relative to the baseline if only the drafter differs; otherwise they are in
    seconds, as each setting has a baseline of its own.
    """
    classes: dict[str, dict[int, Group]] = {}  # the groups by their numbers
    for group_number, group in enumerate(groups, start=1):
        if not any(map(group.position, group.results)):
            continue
        conditions = [group.metric, *(plain_numbers(group.setting.get(key)) for key in _SHARED)]
        classes.setdefault(str(conditions), {})[group_number] = group
    return [_overlay(members) for members in classes.values() if len(members) > 1]


def _overlay(groups: Mapping[int, Group]) -> Overlay:
    settings = [plain_numbers(flat_setting(group.results[0])) for group in groups.values()]
    differing = varying_keys(settings)
    same_baseline = set(differing) <= set(_BESIDE_THE_BASELINE)
    relative = same_baseline and all(group.relative for group in groups.values())
    labels = _overlay_labels(settings, differing, list(groups))
    overlaid = [
        OverlaySetting(
            group_number,
            label,
            replace(group, in_seconds=not relative),
            None if relative else _baseline_s(group),
        )
        for (group_number, group), label in zip(groups.items(), labels, strict=True)
    ]
    timed = [result for group in groups.values() for result in group.results if result.timed]
    fastest_first = sorted(timed, key=lambda result: result.latency_s.mean)
    first_setting = next(iter(groups.values())).setting
    all_points = Group(first_setting, fastest_first, in_seconds=not relative)
    return Overlay(overlaid, all_points, differing)


def _overlay_labels(
    settings: Sequence[Mapping[str, Any]], differing: Sequence[str], numbers: Sequence[int]
) -> list[str]:
    """What tells settings from each other, or their numbers where that is too long or not
    enough.
    """
    keys = [key for key in differing if key not in DERIVED_KEYS]
    labels = [", ".join(_value(key, setting.get(key)) for key in keys) for setting in settings]
    if len(set(labels)) < len(labels) or max(map(len, labels)) > _LONGEST_LABEL:
        return [f"setting {setting_number}" for setting_number in numbers]
    return labels


def _value(key: str, value: Any) -> str:
    if key in ("draft", "second_draft"):
        return "no drafter" if value is None else short_name(value)
    return f"{key} {knob_value(value)}"


def _baseline_s(group: Group) -> float | None:
    """The median over the points of the baseline's mean latency, timed beside each."""
    beside = [
        result.baseline_latency_s.mean
        for result in group.results
        if result.baseline_latency_s is not None
    ]
    return median(beside) if beside else None


def pareto_figure(group: Group, colours: dict[str, Mark]) -> Figure:
    """Draw the points of a setting.

    Marks of the front have their place in it, from 1, as in the list below it.
    """
    barred = {id(result) for result in with_bars(group)}
    traces, hidden_bars = [_front_line(group, MUTED, "Pareto front")], []
    for policy in group.policies:
        mark, results = colours[policy], group.of_policy(policy)
        symbol = (mark.colour, mark.plotly_symbol)
        traces += _points(group, results, barred, escape(policy), symbol)
        unbarred = [result for result in results if id(result) not in barred]
        hidden_bars.append(_bars(group, unbarred, mark.colour, **_HIDDEN_BARS))
    # one entry of the legend shows all of them
    for trace in hidden_bars:
        if trace["x"]:
            trace["showlegend"] = True
            break
    return _figure(group, [*traces, *hidden_bars, _front_numbers(group)])


def overlay_figure(overlay: Overlay) -> Figure:
    """Draw several settings in one picture: a colour for each setting, a symbol for each policy."""
    policies = sorted({policy for setting in overlay.settings for policy in setting.group.policies})
    mark_of_policy = marks(policies)
    mark_of_setting = marks([setting.label for setting in overlay.settings])
    traces, baselines = [], []  # baselines: their places
    for setting in overlay.settings:
        label, group = escape(setting.label), setting.group
        colour = mark_of_setting[setting.label].colour
        front = {id(result) for result in group.front}
        traces.append(_front_line(group, colour, None))
        for policy in group.policies:
            name = f"{escape(policy)}, {label}" if len(policies) > 1 else label
            symbol = (colour, mark_of_policy[policy].plotly_symbol)
            traces += _points(group, group.of_policy(policy), front, name, symbol)
        if setting.baseline_s is not None and group.baseline_quality is not None:
            name = f"{group.setting.baseline}, {setting.label}"
            baselines.append((setting.baseline_s, group.baseline_quality))
            traces.append(_baseline(baselines[-1], colour, name, f"<b>{escape(name)}</b>"))
    return _figure(overlay.all_points, traces, baselines)


def hover_text(result: Result) -> str:
    """Write every knob and number of a result, one per line, escaped for plotly."""
    lines = [(knob, short_value(value)) for knob, value in result.knobs.items()]
    for name in _HOVER_NUMBERS:
        cell = cell_of(result, name)
        title = result.quality.metric if name == "quality" else COLUMNS[name].words
        lines.append((title, f"{cell.text} {cell.detail}".strip()))
    for quality in result.further_qualities.values():
        lines.append((quality.metric, number(quality.value, quality.scale.digits)))
    known = [
        f"{escape(title)}: {escape(text)}" for title, text in lines if not text.startswith(MISSING)
    ]
    return "<br>".join([f"<b>{escape(result.policy)}</b>", *known])


def _figure(
    group: Group, traces: list[Trace], baselines: Sequence[tuple[float, float]] = ()
) -> Figure:
    """The traces with axes, and the baseline where latencies are relative to it. baselines: places of
    others, which the axes must reach.
    """
    horizontal, vertical = _reaching(group.limits(), baselines)
    unit = f"relative to {escape(group.setting.baseline)}" if group.relative else "in seconds"
    aside = "; ".join(filter(None, ["further left is faster", beyond_axis(group)]))
    layout = {
        "xaxis": {
            "title": f"Latency per example, {unit}<br>({escape(aside)})",
            "range": horizontal,
        },
        "yaxis": {"title": escape(group.metric), "range": vertical},
    }
    if group.needs_log_axis:
        ends = [math.log10(end) for end in horizontal]
        layout["xaxis"] |= {"tickvals": log_ticks(*horizontal), "type": "log", "range": ends}
    quality = group.baseline_quality
    if group.relative and quality is not None:
        baseline = next((result for result in group.results if result.is_baseline), None)
        name = escape(group.setting.baseline)
        shown = number(quality, group.scale.digits)
        text = f"<b>{name}</b><br>{escape(group.metric)}: {shown}"
        if baseline is not None:
            text = hover_text(baseline)
        traces.append(_baseline((1.0, quality), MUTED, group.setting.baseline, text, baseline))
        traces.append(scatter([(None, None)], "markers", xaxis="x2", showlegend=False))
        layout |= {"xaxis2": _speedup_axis(group), **_baseline_lines(name, quality, group.scale)}
    return figure_of([trace for trace in traces if trace["x"]], layout, height=520)


def _reaching(
    limits: tuple[tuple[float, float], tuple[float, float]], places: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ranges of x and y, widened for places outside of them. A latency is positive."""
    (left, right), (bottom, top) = limits
    room = 0.05 * (top - bottom)
    for x, y in places:
        left, right = min(left, 0.95 * x), max(right, 1.05 * x)
        bottom, top = min(bottom, y - room), max(top, y + room)
    return (left, right), (bottom, top)


def _points(
    group: Group,
    results: Sequence[Result],
    barred: set[int],
    name: str,
    symbol: tuple[str, str],
) -> list[Trace]:
    """Marks, filled on the front, and the bars of some.

    barred: the ids of the results whose bars are drawn. symbol: the colour and plotly's symbol.
    """
    colour, plotly_symbol = symbol
    placed = [result for result in results if group.position(result) is not None]
    marks = scatter(
        [_place(group.position(result)) for result in placed],
        "markers",
        name=name,
        legendgroup=name,
        text=[hover_text(result) for result in placed],
        hovertemplate=HOVER,
        customdata=[folder_name(result) for result in placed],
        marker={
            "symbol": plotly_symbol,
            "size": 10,
            "color": [colour if group.is_on_front(result) else _TRANSPARENT for result in placed],
            "line": {"color": colour, "width": 2},
        },
    )
    with_intervals = [result for result in results if id(result) in barred]
    return [_bars(group, with_intervals, colour, name=name, legendgroup=name), marks]


def _bars(group: Group, results: Sequence[Result], colour: str, **attributes: Any) -> Trace:
    """The intervals of these results. attributes: further ones of the trace."""
    positions = [group.position(result) for result in results]
    placed = [position for position in positions if position is not None]
    horizontal = [(position.x_low, position.x, position.x_high) for position in placed]
    vertical = [(position.y_low, position.y, position.y_high) for position in placed]
    return scatter(
        [_place(position) for position in placed],
        "markers",
        hoverinfo="skip",
        showlegend=False,
        marker={"size": 1, "color": colour},
        error_x=error_bars(horizontal, colour),
        error_y=error_bars(vertical, colour),
        **attributes,
    )


def _place(position: Position) -> tuple[float, float]:
    return position.x, position.y


def _front_line(group: Group, colour: str, name: str | None) -> Trace:
    corners = front_corners(group)
    line = {"shape": "hv", "color": colour, "width": 2 if name else 1.2}
    places = corners if len(corners) > 1 else []
    return scatter(
        places, "lines", line=line, name=name, showlegend=name is not None, hoverinfo="skip"
    )


def _front_numbers(group: Group) -> Trace:
    """The place of each point in the front, beside its mark."""
    places = [_place(group.position(result)) for result in group.front]
    return scatter(
        places,
        "markers+text",
        marker={"size": 18, "opacity": 0},  # keeps the text off the mark
        text=[f"<b>{front_number}</b>" for front_number, _ in enumerate(places, start=1)],
        textposition="bottom left",
        showlegend=False,
        hoverinfo="skip",
    )


def _baseline(
    place: tuple[float, float],
    colour: str,
    name: str,
    text: str,
    result: Result | None = None,
) -> Trace:
    """The cross of a baseline. result: its own one, if there is one."""
    return scatter(
        [place],
        "markers",
        name=escape(name),
        marker={"symbol": "x-thin", "size": 13, "line": {"width": 3.5, "color": colour}},
        text=[text],
        hovertemplate=HOVER,
        customdata=[None if result is None else folder_name(result)],
    )


def _baseline_lines(name: str, quality: float, scale: MetricScale) -> dict:
    """The baseline's quality, and the one a small loss lower, as lines with their names."""
    shapes, annotations = [], []
    lower = (quality - scale.small_loss, scale.loss_line, "dash")
    for level, label, dash in ((quality, name, "solid"), lower):
        shapes.append(
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "layer": "below",
                "y0": level,
                "y1": level,
                "line": {"color": MUTED, "width": 1, "dash": dash},
            }
        )
        annotations.append(
            {
                "xref": "paper",
                "x": 1,
                "xanchor": "right",
                "yanchor": "bottom",
                "showarrow": False,
                "y": level,
                "text": label,
            }
        )
    return {"shapes": shapes, "annotations": annotations}


def _speedup_axis(group: Group) -> dict:
    """An axis of speedups, one over the latency, above the plot.

    It is drawn only if a trace uses it.
    """
    ticks = speedups_on_axis(group)
    return {
        "overlaying": "x",
        "matches": "x",
        "side": "top",
        "type": "log" if group.needs_log_axis else "linear",
        "title": "Speedup",
        "tickvals": [1 / tick for tick in ticks],
        "ticktext": [f"{tick:g}{TIMES}" for tick in ticks],
        "showgrid": False,
    }
