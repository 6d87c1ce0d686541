"""Speedup against the batch in the HTML report: a curve for each policy, and where it stops paying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from bild_lab.lab.formatting import number
from bild_lab.lab.results.batches import BatchCurve
from bild_lab.report.page.plots import Figure, figure_of
from bild_lab.report.style import Mark


def batch_figure(curves: Sequence[BatchCurve], colours: Mapping[str, Mark]) -> Figure | None:
    """Draw measured speedups with their intervals, and the predicted ones dashed; None without curves."""
    if not curves:
        return None
    traces = []
    for curve in curves:
        mark, name = colours[curve.policy], escape(curve.label)
        points = [one for one in curve.points if one.result.speedup.value is not None]
        speedups = [one.result.speedup for one in points]
        traces.append(
            {
                "type": "scatter",
                "x": [one.batch for one in points],
                "y": [one.value for one in speedups],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [one.high - one.value for one in speedups],
                    "arrayminus": [one.value - one.low for one in speedups],
                    "color": mark.colour,
                    "thickness": 1,
                },
                "customdata": [f"{one.result.tokens_per_s:.0f} tokens/s" for one in points],
                "name": name,
                "mode": "lines+markers",
                "line": {"color": mark.colour, "width": 1.8},
                "marker": {"symbol": mark.plotly_symbol, "size": 9},
                "hovertemplate": "batch %{x}: %{y:.2f}×, %{customdata}<extra></extra>",
            }
        )
        predicted = [one for one in curve.points if one.predicted is not None]
        if predicted:
            traces.append(
                {
                    "type": "scatter",
                    "x": [one.batch for one in predicted],
                    "y": [one.predicted for one in predicted],
                    "name": f"{name}, predicted",
                    "mode": "lines",
                    "line": {"color": mark.colour, "width": 1.2, "dash": "dot"},
                    "hovertemplate": "predicted at batch %{x}: %{y:.2f}×<extra></extra>",
                }
            )
    batches = sorted({one.batch for curve in curves for one in curve.points})
    layout = {
        "xaxis": {
            "title": "Texts at once",
            "type": "log",
            "tickvals": batches,
            "ticktext": [str(one) for one in batches],
        },
        "yaxis": {"title": "Speedup over the baseline at the same batch", "rangemode": "tozero"},
        "shapes": [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"width": 1, "dash": "dash"}}
        ],
    }
    return figure_of(traces, layout, height=440)


def batch_rows(curves: Sequence[BatchCurve]) -> list[dict[str, str]]:
    """The table below the figure: what each policy did at every batch."""
    rows = []
    for curve in curves:
        even = curve.break_even
        for one in curve.points:
            result, speedup = one.result, one.result.speedup
            interval = "" if speedup.low is None else f" [{number(speedup.low)}, {number(speedup.high)}]"
            rows.append(
                {
                    "policy": curve.label,
                    "batch": str(one.batch),
                    "speedup": "–" if speedup.value is None else f"{number(speedup.value)}×{interval}",
                    "predicted": "–" if one.predicted is None else f"{number(one.predicted)}×",
                    "tokens/s": number(result.tokens_per_s, 0),
                    "baseline, tokens/s": number(result.baseline_tokens_per_s, 0),
                    "median latency, ms": number(1000 * result.latency_s.median, 0),
                    "p95, ms": number(1000 * result.latency_s.p95, 0),
                    "break-even batch": f"none up to {curve.points[-1].batch}" if even is None else number(even, 1),
                }
            )
    return rows
