"""The figures of the HTML report, as plotly figures; colours of text and grid follow the page's scheme."""

import math
from html import escape

import plotly.graph_objects as go

from bild_lab.lab.formatting import (
    MINUS,
    MISSING,
    TIMES,
    duration,
    interval,
    knob_value,
    number,
    percent,
    point_label,
    signed,
    signed_interval,
    times,
)
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.columns import COLUMNS
from bild_lab.lab.schema.result import Result
from bild_lab.report.pareto_figure import front_corners, log_ticks, speedups_on_axis
from bild_lab.report.provenance import disturbance
from bild_lab.report.style import MUTED, STAGE_COLOURS, Mark

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_HOVER = "%{customdata}<extra></extra>"
_HOVER_NUMBERS = (
    "tokens_per_s",
    "tokens_per_target_call",
    "acceptance_rate",
    "fallbacks",
    "rollbacks",
    "agreement_with_target",
    "point",
)


def pareto_figure(group: Group, colours: dict[str, Mark]) -> go.Figure:
    """Draw quality against latency; hovering over a point shows its knobs and numbers."""
    figure = go.Figure()
    corners = front_corners(group)
    if len(corners) > 1:
        xs, ys = zip(*corners, strict=True)
        line = {"shape": "hv", "color": MUTED, "width": 2}
        figure.add_scatter(x=xs, y=ys, mode="lines", line=line, name="Pareto front", hoverinfo="skip")
    for policy in group.policies:
        results = [one for one in group.of_policy(policy) if group.position(one) is not None]
        if results:
            figure.add_trace(_policy_trace(group, results, colours[policy]))
    _add_baseline(figure, group)
    unit = f"relative to {escape(group.setting.baseline)}" if group.relative else "in seconds"
    figure.update_layout(xaxis_title=f"Latency per example, {unit} (further left is faster)")
    horizontal, vertical = group.limits()
    figure.update_layout(yaxis_title=escape(group.metric), xaxis_range=horizontal, yaxis_range=vertical)
    if group.wide:
        ticks = {"tickvals": log_ticks(*horizontal), "type": "log", "range": [math.log10(end) for end in horizontal]}
        figure.update_layout(xaxis=ticks)
    return finished(figure, height=520)


def stages_figure(group: Group) -> go.Figure | None:
    """Stack each stage's part of the mean latency, in milliseconds; None if no stage was traced.

    The proportions come from a traced pass over some of the examples. That pass is slower than the timed one,
    so the lengths come from the timed one.
    """
    results = [result for result in group.selected() if result.stages_s]
    if not results:
        return None
    labels = _unique_labels(group, results)
    figure = go.Figure()
    for stage, colour in STAGE_COLOURS.items():
        shares = [result.stages_s[stage] / sum(result.stages_s.values()) for result in results]
        figure.add_bar(
            x=[1000 * share * result.latency_s.mean for share, result in zip(shares, results, strict=True)],
            y=labels,
            customdata=[percent(share) for share in shares],
            orientation="h",
            name=stage,
            marker={"color": colour},
            hovertemplate=f"%{{y}}<br>{stage}: %{{x:.1f}} ms, %{{customdata}}<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.35, legend={"traceorder": "normal"})
    figure.update_xaxes(title="Milliseconds per example (mean)")
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    return finished(figure, height=180 + 30 * len(results))


def acceptance_figure(group: Group, colours: dict[str, Mark]) -> go.Figure | None:
    """Draw how often a drafted token was accepted, by its position in the draft; None if nothing was drafted."""
    results = [result for result in group.notable() if result.counts.acceptance_by_position]
    if not results:
        return None
    figure = go.Figure()
    count: dict[str, int] = {}
    for result, label in zip(results, _unique_labels(group, results), strict=True):
        policy = result.policy
        mark = colours.get(policy, Mark(MUTED, "x", "x"))
        dash = _DASHES[count.setdefault(policy, 0) % len(_DASHES)]
        count[policy] += 1
        rates = result.counts.acceptance_by_position
        figure.add_scatter(
            x=list(range(1, len(rates) + 1)),
            y=[None if rate is None else 100 * rate for rate in rates],
            name=label,
            mode="lines+markers",
            line={"color": mark.colour, "dash": dash, "width": 1.8},
            marker={"symbol": mark.plotly_symbol, "size": 6},
            hovertemplate=f"{label}<br>position %{{x}}: %{{y:.1f}} %<extra></extra>",
        )
    figure.update_xaxes(title="Position in the draft", dtick=1, zeroline=False)
    figure.update_yaxes(title="Accepted (%)", rangemode="tozero")
    return finished(figure, height=380)


def hover_text(result: Result) -> str:
    """Write every knob and number of a result, one per line, escaped for plotly."""
    quality, speedup = result.quality, result.speedup
    bounds = signed_interval(quality.difference_low, quality.difference_high)
    lines = [(knob, knob_value(value)) for knob, value in result.knobs.items()]
    lines += [
        (COLUMNS["speedup"].words, f"{times(speedup.value)} {interval(speedup.low, speedup.high)}"),
        ("do not rely on it", disturbance(result.environment) or MISSING),
        (quality.metric, f"{number(quality.value)} {interval(quality.low, quality.high)}"),
        (COLUMNS["quality_difference"].title, f"{signed(quality.difference)} {bounds}"),
        ("latency, median", duration(result.latency_s.median)),
        (COLUMNS["latency_s_p95"].words, duration(result.latency_s.p95)),
        *((COLUMNS[name].words, COLUMNS[name].text(result)) for name in _HOVER_NUMBERS),
    ]
    shown = [f"{escape(name)}: {escape(text)}" for name, text in lines if not text.startswith(MISSING)]
    return "<br>".join([f"<b>{escape(result.policy)}</b>", *shown])


def _policy_trace(group: Group, results: list[Result], mark: Mark) -> go.Scatter:
    front = {id(result) for result in group.front()}
    positions = [group.position(result) for result in results]
    fills = [mark.colour if id(result) in front else "rgba(0,0,0,0)" for result in results]
    error = {"type": "data", "symmetric": False, "thickness": 0.8, "width": 0, "color": _faint(mark.colour)}
    return go.Scatter(
        x=[position.x for position in positions],
        y=[position.y for position in positions],
        error_x={
            **error,
            "array": [p.x_high - p.x for p in positions],
            "arrayminus": [p.x - p.x_low for p in positions],
        },
        error_y={
            **error,
            "array": [p.y_high - p.y for p in positions],
            "arrayminus": [p.y - p.y_low for p in positions],
        },
        mode="markers",
        name=escape(results[0].policy),
        marker={
            "symbol": mark.plotly_symbol,
            "size": 10,
            "color": fills,
            "line": {"color": mark.colour, "width": 2},
        },
        customdata=[hover_text(result) for result in results],
        hovertemplate=_HOVER,
    )


def _add_baseline(figure: go.Figure, group: Group) -> None:
    quality = group.baseline_quality
    if not group.relative or quality is None:
        return
    own = next((result for result in group.results if result.is_baseline), None)
    name = escape(group.setting.baseline)
    mark = {"symbol": "x-thin", "size": 13, "line": {"width": 3.5, "color": MUTED}}
    text = hover_text(own) if own is not None else f"<b>{name}</b><br>{escape(group.metric)}: {number(quality)}"
    figure.add_scatter(
        x=[1.0], y=[quality], mode="markers", name=name, marker=mark, customdata=[text], hovertemplate=_HOVER
    )
    for level, label, dash in ((quality, name, "solid"), (quality - 1, f"{MINUS}1 point", "dash")):
        line = {"color": MUTED, "width": 1, "dash": dash}
        figure.add_hline(y=level, line=line, layer="below")
        at = {"x": 1, "xref": "paper", "xanchor": "left", "y": level, "xshift": 6}
        figure.add_annotation(**at, text=label, showarrow=False, font={"color": MUTED})
    _add_speedup_axis(figure, group)


def _add_speedup_axis(figure: go.Figure, group: Group) -> None:
    """Add an x axis of speedups, one over the latency, above the plot; plotly draws an axis only with a trace."""
    ticks = speedups_on_axis(group)
    figure.add_scatter(x=[None], y=[None], xaxis="x2", showlegend=False, hoverinfo="skip")
    figure.update_layout(
        xaxis2={
            "overlaying": "x",
            "matches": "x",
            "side": "top",
            "type": "log" if group.wide else "linear",
            "title": "Speedup",
            "tickvals": [1 / tick for tick in ticks],
            "ticktext": [f"{tick:g}{TIMES}" for tick in ticks],
            "showgrid": False,
        },
    )


def _unique_labels(group: Group, results: list[Result]) -> list[str]:
    """Label results by policy and distinguishing knobs; a repeated label would merge two bars into one."""
    labels: list[str] = []
    for result in results:
        label = escape(point_label(result, group.knobs(result)))
        labels.append(label if label not in labels else f"{label} {result.point}")
    return labels


def finished(figure: go.Figure, height: int) -> go.Figure:
    """The figure with the page's colours, margins and legend."""
    figure.update_layout(
        height=height,
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 64, "r": 84, "t": 64, "b": 96},
        hoverlabel={"align": "left"},
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": MUTED, "activecolor": MUTED},
        legend={"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0.01, "x": 0},
        showlegend=True,
    )
    font = {"size": 13}
    figure.update_xaxes(zeroline=False, title={"standoff": 12, "font": font})
    figure.update_yaxes(zeroline=False, title={"standoff": 12, "font": font})
    return figure


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.35)"
