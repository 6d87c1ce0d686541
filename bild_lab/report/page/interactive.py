"""Two figures of the HTML report: where an example's time goes, and which drafted tokens were accepted."""

from __future__ import annotations

from html import escape

from bild_lab.lab.formatting import (
    MISSING,
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
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.report.page.plots import Figure, figure_of
from bild_lab.report.provenance import disturbance
from bild_lab.report.style import MUTED, STAGE_COLOURS, Mark

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_HOVER_NUMBERS = (
    "tokens_per_s",
    "tokens_per_target_call",
    "acceptance_rate",
    "fallbacks",
    "rollbacks",
    "agreement_with_target",
    "point",
)


def stages_figure(group: Group) -> Figure | None:
    """Stack each stage's part of the mean latency, in milliseconds; None if no stage was traced.

    The proportions come from a traced pass over some of the examples. That pass is slower than the timed one,
    so the lengths come from the timed one.
    """
    results = [result for result in group.selected() if result.stages_s]
    if not results:
        return None
    labels = _unique_labels(group, results)
    traces = []
    for stage, colour in STAGE_COLOURS.items():
        shares = [result.stages_s[stage] / sum(result.stages_s.values()) for result in results]
        traces.append(
            {
                "type": "bar",
                "x": [1000 * share * result.latency_s.mean for share, result in zip(shares, results, strict=True)],
                "y": labels,
                "customdata": [percent(share) for share in shares],
                "orientation": "h",
                "name": stage,
                "marker": {"color": colour},
                "hovertemplate": f"%{{y}}<br>{stage}: %{{x:.1f}} ms, %{{customdata}}<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "legend": {"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0.01, "traceorder": "normal"},
        "xaxis": {"title": "Milliseconds per example (mean)"},
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False},
    }
    return figure_of(traces, layout, height=180 + 30 * len(results))


def acceptance_figure(group: Group, colours: dict[str, Mark]) -> Figure | None:
    """Draw how often a drafted token was accepted, by its position in the draft; None if nothing was drafted."""
    results = [result for result in group.notable() if result.counts.acceptance_by_position]
    if not results:
        return None
    traces = []
    count: dict[str, int] = {}
    for result, label in zip(results, _unique_labels(group, results), strict=True):
        policy = result.policy
        mark = colours.get(policy, Mark(MUTED, "x", "x"))
        dash = _DASHES[count.setdefault(policy, 0) % len(_DASHES)]
        count[policy] += 1
        rates = result.counts.acceptance_by_position
        traces.append(
            {
                "type": "scatter",
                "x": list(range(1, len(rates) + 1)),
                "y": [None if rate is None else 100 * rate for rate in rates],
                "name": label,
                "mode": "lines+markers",
                "line": {"color": mark.colour, "dash": dash, "width": 1.8},
                "marker": {"symbol": mark.plotly_symbol, "size": 6},
                "hovertemplate": f"{label}<br>position %{{x}}: %{{y:.1f}} %<extra></extra>",
            }
        )
    layout = {
        "xaxis": {"title": "Position in the draft", "dtick": 1},
        "yaxis": {"title": "Accepted (%)", "rangemode": "tozero"},
    }
    return figure_of(traces, layout, height=380)


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
        *((one.metric, number(one.value)) for one in result.further_qualities.values()),
        ("latency, median", duration(result.latency_s.median)),
        (COLUMNS["latency_s_p95"].words, duration(result.latency_s.p95)),
        *((COLUMNS[name].words, COLUMNS[name].text(result)) for name in _HOVER_NUMBERS),
    ]
    shown = [f"{escape(name)}: {escape(text)}" for name, text in lines if not text.startswith(MISSING)]
    return "<br>".join([f"<b>{escape(result.policy)}</b>", *shown])


def _unique_labels(group: Group, results: list[Result]) -> list[str]:
    """Label results by policy and distinguishing knobs; a repeated label would merge two bars into one."""
    labels: list[str] = []
    for result in results:
        label = escape(point_label(result, group.knobs(result)))
        labels.append(label if label not in labels else f"{label} {result.point}")
    return labels
