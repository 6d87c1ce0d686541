"""Quality against latency on the page: of one setting, or of several that may be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import median
from typing import Any

from bild_lab.lab.schema.formatting import (
    MINUS,
    MISSING,
    TIMES,
    knob_value,
    number,
    short_name,
)
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.lab.store.groups import Group
from bild_lab.lab.store.hashing import plain_numbers
from bild_lab.report.page.base import HOVER, Figure, Trace, error_bars, figure_of, scatter
from bild_lab.report.page.tables import cell_of, name_of
from bild_lab.report.paired_comparison import DERIVED_KEYS, flat_setting
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

# what settings must share to be in one picture
_SHARED = (
    *(
        "target",
        "weights",
        "dataset",
        "split",
        "data",
        "n_examples",
        "prompt_template",
        "chat_template",
    ),
    *("max_source_tokens", "metric", "device", "hardware"),
)
# what does not change the baseline, so that latencies relative to it can be compared
_BESIDE_THE_BASELINE = ("draft", "second_draft", "compile_drafter", "repeats", "warmup")
_LONGEST_LABEL = 40
_HOVER_NUMBERS = (
    *(
        "speedup",
        "quality",
        "quality_difference",
        "latency_s_median",
        "tokens_per_s",
        "tokens_per_target_call",
    ),
    *("acceptance_rate", "fallbacks", "rollbacks", "agreement_with_target", "point"),
)
_NONE = "rgba(0,0,0,0)"
_LATER = {"name": "bars of the other points", "legendgroup": "bars", "visible": "legendonly"}


@dataclass(frozen=True)
class Part:
    """A setting in a picture. number: of the setting, from 1. baseline_s: its baseline's mean
    latency, if drawn.
    """

    number: int
    label: str
    group: Group
    baseline_s: float | None


@dataclass(frozen=True)
class Overlay:
    """Settings that may be compared. whole: all their points. differing: the keys of the setting
    that differ.
    """

    parts: list[Part]
    whole: Group
    differing: list[str]


def overlays(groups: Sequence[Group]) -> list[Overlay]:
    """A picture for each set of several settings that share target, data and machine.

    Latencies are relative to the baseline if only the drafter differs; otherwise they are in
    seconds, as each setting has a baseline of its own.
    """
    classes: dict[str, list[tuple[int, Group]]] = {}
    for place, group in enumerate(groups, start=1):
        if not any(map(group.position, group.results)):
            continue
        conditions = [group.metric, *(plain_numbers(group.setting.get(key)) for key in _SHARED)]
        classes.setdefault(str(conditions), []).append((place, group))
    return [_overlay(members) for members in classes.values() if len(members) > 1]


def _overlay(members: Sequence[tuple[int, Group]]) -> Overlay:
    flat = {place: plain_numbers(flat_setting(group.results[0])) for place, group in members}
    keys = dict.fromkeys(key for one in flat.values() for key in one)
    differing = [key for key in keys if len({str(one.get(key)) for one in flat.values()}) > 1]
    relative = set(differing) <= set(_BESIDE_THE_BASELINE) and all(
        group.relative for _, group in members
    )
    named = [key for key in differing if key not in DERIVED_KEYS]
    labels = {
        place: ", ".join(_value(key, flat[place].get(key)) for key in named) for place, _ in members
    }
    if len(set(labels.values())) < len(members) or max(map(len, labels.values())) > _LONGEST_LABEL:
        labels = {place: f"setting {place}" for place, _ in members}
    parts = [
        Part(
            place,
            labels[place],
            replace(group, in_seconds=not relative),
            None if relative else _baseline_s(group),
        )
        for place, group in members
    ]
    timed = [one for part in parts for one in part.group.results if one.timed]
    everything = sorted(timed, key=lambda one: one.latency_s.mean)
    return Overlay(
        parts, Group(members[0][1].setting, everything, in_seconds=not relative), differing
    )


def _value(key: str, value: Any) -> str:
    if key in ("draft", "second_draft"):
        return "no drafter" if value is None else short_name(value)
    return f"{key} {knob_value(value)}"


def _baseline_s(group: Group) -> float | None:
    """The median over the points of the baseline's mean latency, timed beside each."""
    beside = [
        one.baseline_latency_s.mean for one in group.results if one.baseline_latency_s is not None
    ]
    return median(beside) if beside else None


def pareto_figure(group: Group, colours: dict[str, Mark]) -> Figure:
    """Draw the points of a setting.

    Marks of the front have their place in it, from 1, as in the list below it.
    """
    barred, later, traces = (
        set(map(id, with_bars(group))),
        [],
        [_front_line(group, MUTED, "Pareto front")],
    )
    for policy in group.policies:
        look, results = colours[policy], group.of_policy(policy)
        others = [one for one in results if id(one) not in barred]
        traces += _points(group, results, barred, escape(policy), (look.colour, look.plotly_symbol))
        later.append(_bars(group, others, look.colour, **_LATER))
    # one entry of the legend shows all of them
    if shown := next((trace for trace in later if trace["x"]), None):
        shown["showlegend"] = True
    return _figure(group, [*traces, *later, _front_numbers(group)])


def overlay_figure(overlay: Overlay) -> Figure:
    """Draw several settings in one picture: a colour for each setting, a symbol for each policy."""
    whole = overlay.whole
    policies = sorted({policy for part in overlay.parts for policy in part.group.policies})
    symbols = {policy: look.plotly_symbol for policy, look in marks(policies).items()}
    colours = {
        label: look.colour for label, look in marks([part.label for part in overlay.parts]).items()
    }
    traces = []
    for part in overlay.parts:
        label, group, colour = escape(part.label), part.group, colours[part.label]
        front = set(map(id, group.front()))
        names = {
            policy: f"{escape(policy)}, {label}" if len(policies) > 1 else label
            for policy in group.policies
        }
        traces.append(_front_line(group, colour, None))
        for policy, name in names.items():
            traces += _points(
                group, group.of_policy(policy), front, name, (colour, symbols[policy])
            )
        if part.baseline_s is not None and group.baseline_quality is not None:
            name = f"{group.setting.baseline}, {part.label}"
            traces.append(
                _baseline(
                    part.baseline_s, group.baseline_quality, colour, name, f"<b>{escape(name)}</b>"
                )
            )
    return _figure(whole, traces)


def hover_text(result: Result) -> str:
    """Write every knob and number of a result, one per line, escaped for plotly."""
    lines = [(knob, knob_value(value)) for knob, value in result.knobs.items()]
    for name in _HOVER_NUMBERS:
        cell, words = cell_of(result, name), COLUMNS[name].words
        lines.append(
            (
                result.quality.metric if name == "quality" else words,
                f"{cell.text} {cell.detail}".strip(),
            )
        )
    lines += [(one.metric, number(one.value)) for one in result.further_qualities.values()]
    shown = [
        f"{escape(name)}: {escape(text)}" for name, text in lines if not text.startswith(MISSING)
    ]
    return "<br>".join([f"<b>{escape(result.policy)}</b>", *shown])


def _figure(group: Group, traces: list[Trace]) -> Figure:
    """The traces with axes, and the baseline where latencies are relative to it."""
    horizontal, vertical = group.limits()
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
    if group.relative and (quality := group.baseline_quality) is not None:
        own = next((result for result in group.results if result.is_baseline), None)
        name = escape(group.setting.baseline)
        text = (
            f"<b>{name}</b><br>{escape(group.metric)}: {number(quality)}"
            if own is None
            else hover_text(own)
        )
        traces.append(_baseline(1.0, quality, MUTED, group.setting.baseline, text, own))
        traces.append(scatter([(None, None)], "markers", xaxis="x2", showlegend=False))
        layout |= {"xaxis2": _speedup_axis(group), **_baseline_lines(name, quality)}
    return figure_of([trace for trace in traces if trace["x"]], layout, height=520)


def _points(
    group: Group, results: Sequence[Result], barred: set[int], name: str, look: tuple[str, str]
) -> list[Trace]:
    """Marks of a colour and a symbol, filled on the front. barred: the ids of the results whose
    bars are drawn.
    """
    colour, symbol = look
    placed = [(one, at) for one in results if (at := group.position(one)) is not None]
    front = set(map(id, group.front()))
    named = {"name": name, "legendgroup": name}
    marks = scatter(
        [(at.x, at.y) for _, at in placed],
        "markers",
        **named,
        text=[hover_text(one) for one, _ in placed],
        hovertemplate=HOVER,
        customdata=[name_of(one) for one, _ in placed],
        marker={
            "symbol": symbol,
            "size": 10,
            "color": [colour if id(one) in front else _NONE for one, _ in placed],
            "line": {"color": colour, "width": 2},
        },
    )
    return [_bars(group, [one for one in results if id(one) in barred], colour, **named), marks]


def _bars(group: Group, results: Sequence[Result], colour: str, **look: Any) -> Trace:
    """The intervals of these results."""
    placed = [at for one in results if (at := group.position(one)) is not None]
    return scatter(
        [(at.x, at.y) for at in placed],
        "markers",
        hoverinfo="skip",
        showlegend=False,
        marker={"size": 1, "color": colour},
        error_x=error_bars([(at.x_low, at.x, at.x_high) for at in placed], colour),
        error_y=error_bars([(at.y_low, at.y, at.y_high) for at in placed], colour),
        **look,
    )


def _front_line(group: Group, colour: str, name: str | None) -> Trace:
    corners = front_corners(group)
    line = {"shape": "hv", "color": colour, "width": 2 if name else 1.2}
    places = corners if len(corners) > 1 else []
    return scatter(
        places, "lines", line=line, name=name, showlegend=name is not None, hoverinfo="skip"
    )


def _front_numbers(group: Group) -> Trace:
    """The place of each point in the front, beside its mark."""
    positions = [group.position(result) for result in group.front()]
    return scatter(
        [(at.x, at.y) for at in positions],
        "markers+text",
        marker={"size": 18, "opacity": 0},  # keeps the text off the mark
        text=[f"<b>{place}</b>" for place, _ in enumerate(positions, start=1)],
        textposition="bottom left",
        showlegend=False,
        hoverinfo="skip",
    )


def _baseline(
    x: float, y: float, colour: str, name: str, text: str, own: Result | None = None
) -> Trace:
    return scatter(
        [(x, y)],
        "markers",
        name=escape(name),
        marker={"symbol": "x-thin", "size": 13, "line": {"width": 3.5, "color": colour}},
        text=[text],
        hovertemplate=HOVER,
        customdata=[None if own is None else name_of(own)],
    )


def _baseline_lines(name: str, quality: float) -> dict:
    """The baseline's quality, and the one a point lower, as lines with their names."""
    levels = ((quality, name, "solid"), (quality - 1, f"{MINUS}1 point", "dash"))
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "layer": "below"}
    at = {"xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom", "showarrow": False}
    return {
        "shapes": [
            {**across, "y0": level, "y1": level, "line": {"color": MUTED, "width": 1, "dash": dash}}
            for level, _, dash in levels
        ],
        "annotations": [{**at, "y": level, "text": label} for level, label, _ in levels],
    }


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
