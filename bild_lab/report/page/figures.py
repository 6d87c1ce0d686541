"""The pages' other figures: where time goes, acceptance, certificates, batches, fitted trees,
comparisons.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from typing import Any

import numpy as np

from bild_lab.lab.metrics.quality import Difference
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.formatting import interval, number, percent, signed
from bild_lab.lab.schema.numbers import Speedup, scale_of
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.batch_curves import BatchCurve
from bild_lab.lab.store.groups import Group
from bild_lab.report.along_text import stretches_of
from bild_lab.report.page.base import HOVER, Figure, Trace, error_bars, escape, figure_of, scatter
from bild_lab.report.paired_comparison import NOT_COMPARED, SAME, TOO_FEW, UNCLEAR, PointComparison
from bild_lab.report.style import COLOURS, MUTED, STAGE_COLOURS, Mark
from bild_lab.report.tables import folder_name

# the ends of the bars of gaps, in nats
GAPS = (-math.inf, *(10.0**power for power in range(-7, 3)), math.inf)
KINDS = {  # the verdicts on a text that differs from the target's, and their colours
    "rounding by the number of rows": "#2a78b5",
    "another tie": "#7fb2d9",
    "defect": "#c23b22",
    "defect of the model’s session": "#7a1f12",
}
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_DASHED = {"type": "line", "line": {"color": MUTED, "width": 1, "dash": "dash"}}
_LABEL = 26  # characters on a line of a bar's label
_LARGEST = 22.0  # pixels, a node that is always reached
_GOOD, _BAD = COLOURS[0], COLOURS[1]


def stages_figure(group: Group) -> Figure | None:
    """Stack each stage's part of the mean latency, in milliseconds; None if no stage was traced.

    The proportions are those of some of the examples, from decoding with clocks, which may have
    been a slower pass of its own. So the lengths come from the timed repeats.
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
                "x": [
                    1000 * share * result.latency_s.mean
                    for share, result in zip(shares, results, strict=True)
                ],
                "y": labels,
                "customdata": [percent(share) for share in shares],
                "orientation": "h",
                "name": stage,
                "marker": {"color": colour},
                "hovertemplate": (
                    f"%{{y}}<br>{stage}: %{{x:.1f}} ms, %{{customdata}}<extra></extra>"
                ),
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"title": "Milliseconds per example (mean)"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    lines = sum(label.count("<br>") for label in labels)
    return figure_of(traces, layout, height=180 + 30 * len(results) + 14 * lines)


def acceptance_figure(group: Group, colours: Mapping[str, Mark]) -> Figure | None:
    """Draw how often a drafted token was accepted, by its position in the draft; None if nothing
    was drafted.
    """
    results = [result for result in group.notable() if result.counts.acceptance_by_position]
    if not results:
        return None
    traces = []
    drawn: Counter[str] = Counter()  # lines by policy
    for result in results:
        dash = _DASHES[drawn[result.policy] % len(_DASHES)]
        drawn[result.policy] += 1
        mark = colours.get(result.policy, Mark(MUTED, "x", "x"))
        rates = [
            None if rate is None else 100 * rate for rate in result.counts.acceptance_by_position
        ]
        trace = _line(range(1, len(rates) + 1), rates, escape(group.label(result)), mark)
        trace["line"] = {"color": mark.colour, "dash": dash, "width": 1.8}
        trace["hovertemplate"] = "%{fullData.name}<br>position %{x}: %{y:.1f} %<extra></extra>"
        traces.append(trace)
    layout = {
        "xaxis": {"title": "Position in the draft", "dtick": 1},
        "yaxis": {"title": "Accepted (%)", "rangemode": "tozero"},
    }
    return figure_of(traces, layout, height=400)


def along_text_figure(
    group: Group, stored: Mapping[str, Sequence[MeasuredExample]], colours: Mapping[str, Mark]
) -> Figure | None:
    """Draw the tokens per call of the target by how long the text was; None if nothing was drafted,
    or unless enough texts reach two stretches. stored: the examples of each point, by its name.
    """
    traces, stretches = [], {}
    drawn: Counter[str] = Counter()  # lines by policy
    for result in group.notable():
        point_stretches = stretches_of(stored.get(folder_name(result), ()))
        if not result.counts.drafted or len(point_stretches) < 2:
            continue
        stretches |= {stretch.begin: stretch.words for stretch in point_stretches}
        mark = colours.get(result.policy, Mark(MUTED, "x", "x"))
        values = [stretch.tokens_per_call for stretch in point_stretches]
        words = [stretch.words for stretch in point_stretches]
        trace = _line(words, values, escape(group.label(result)), mark)
        trace["line"] = {**trace["line"], "dash": _DASHES[drawn[result.policy] % len(_DASHES)]}
        drawn[result.policy] += 1
        trace["error_y"] = error_bars(
            [(stretch.low, stretch.tokens_per_call, stretch.high) for stretch in point_stretches],
            mark.colour,
        )
        trace["customdata"] = [
            f"{number(stretch.calls, 0)} calls in {stretch.texts} texts"
            for stretch in point_stretches
        ]
        trace["hovertemplate"] = (
            "%{fullData.name}<br>tokens %{x}: %{y:.2f}, %{customdata}<extra></extra>"
        )
        traces.append(trace)
    if not traces:
        return None
    all_words = [stretches[begin] for begin in sorted(stretches)]
    layout = {
        "xaxis": {
            "title": "New tokens of the text",
            "type": "category",
            "categoryarray": all_words,
        },
        "yaxis": {"title": "Tokens per call of the target", "rangemode": "tozero"},
    }
    return figure_of(traces, layout, height=400)


def divergence_figure(certificates: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Count the greedy texts that differ from the target's, by the gap of its two most likely
    tokens and by kind.

    Only where the target scored both tokens; None if there is no such text. certificates: those of
    all texts of a setting.
    """
    gaps_of_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for certificate in certificates:
        if certificate.get("margin") is not None:
            gaps_of_kind[_kind(certificate)].append(certificate["margin"])
    if not any(gaps_of_kind.values()):
        return None
    between = [f"{low:g} to {high:g}" for low, high in pairwise(GAPS[1:-1])]
    labels = [f"below {GAPS[1]:g}", *between, f"{GAPS[-2]:g} and more"]
    traces = []
    for kind, gaps in gaps_of_kind.items():
        counts, _ = np.histogram(gaps, GAPS)
        if counts.any():
            traces.append(
                {
                    "type": "bar",
                    "name": kind,
                    "x": labels,
                    "y": counts.tolist(),
                    "marker": {"color": KINDS[kind]},
                    "hovertemplate": f"%{{x}} nats<br>{kind}: %{{y}} texts<extra></extra>",
                }
            )
    layout = {
        "barmode": "stack",
        "xaxis": {
            "title": "Gap between the target’s two most likely tokens, nats",
            "type": "category",
        },
        "yaxis": {"title": "Texts", "rangemode": "tozero"},
    }
    return figure_of(traces, layout, 400)


def _kind(certificate: Mapping[str, Any]) -> str:
    """Its name among `KINDS`."""
    by_rows, tie, defect, session = KINDS
    if certificate["verdict"] == "numerical tie":
        wide = certificate.get("wide_gap")
        return by_rows if wide is not None and wide <= 0 < certificate["gap"] else tie
    return defect if certificate["verdict"] == "defect" else session


def batch_figure(curves: Sequence[BatchCurve], colours: Mapping[str, Mark]) -> Figure | None:
    """Draw measured speedups with their intervals; None without curves."""
    if not curves:
        return None
    traces = []
    for curve in curves:
        mark, name = colours[curve.policy], escape(curve.label)
        points = [result for result in curve.points if result.speedup.value is not None]
        speedups = [result.speedup for result in points]
        trace = _line(
            [result.setting.batch for result in points],
            [speedup.value for speedup in speedups],
            name,
            mark,
        )
        trace["error_y"] = error_bars(
            [(speedup.low, speedup.value, speedup.high) for speedup in speedups], mark.colour
        )
        trace["customdata"] = [f"{result.tokens_per_s:.0f} tokens/s" for result in points]
        trace["hovertemplate"] = "batch %{x}: %{y:.2f}×, %{customdata}<extra></extra>"
        traces.append(trace)
    batches = sorted({result.setting.batch for curve in curves for result in curve.points})
    ticks = {"tickvals": batches, "ticktext": [str(batch) for batch in batches]}
    layout = {
        "xaxis": {"title": "Texts at once", "type": "log", **ticks},
        "yaxis": {"title": "Speedup at the same batch", "rangemode": "tozero"},
        "shapes": [{**_DASHED, "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}],
    }
    return figure_of(traces, layout, height=440)


def fitted_trees(group: Group) -> list[tuple[Result, Mapping[str, Any]]]:
    """The points that drafted with a tree of `scripts/fit_tree.py`, and the content of its file."""
    fitted = []
    for result in group.results:
        tree = result.facts.get("trained", {}).get("tree")
        if tree and "acceptance" in tree:
            fitted.append((result, tree))
    return fitted


def tree_figure(label: str, content: Mapping[str, Any]) -> Figure:
    """Draw the tree of a file for candidates of all depths, from left to right.

    The area of a node is its probability of being accepted. Its text is its rank, from 1, and its
    number of masks.
    """
    tree, acceptance = content["trees"][-1], content["acceptance"]
    parents = [parent + 1 for parent in tree["parents"]]  # rows; row 0 is the last committed token
    heights, depths, accept_probs = _heights(parents), [0], [1.0]
    hover_texts, edge_xs, edge_ys = ["the last committed token"], [], []
    for row, (parent, rank) in enumerate(zip(parents, tree["ranks"], strict=True), start=1):
        depths.append(depths[parent] + 1)
        right_prob = acceptance[depths[parent]][rank]
        accept_probs.append(accept_probs[parent] * right_prob)
        edge_xs += [depths[parent], depths[row], None]
        edge_ys += [heights[parent], heights[row], None]
        hover_texts.append(
            f"depth {depths[row]}, rank {rank + 1}: right in {percent(right_prob)} after what is"
            f" right before it;<br>accepted in {percent(accept_probs[-1])} of all rounds"
        )
    ranks = ["", *(str(rank + 1) for rank in tree["ranks"])]
    masks = [f" +{count}" if count else "" for count in tree["probes"]]
    nodes = scatter(
        zip(depths, heights, strict=True),
        "markers+text",
        text=[f"\u2002{rank}{mask}" for rank, mask in zip(ranks, masks, strict=True)],
        textposition="middle right",
        hovertext=hover_texts,
        hoverinfo="text",
        marker={
            "size": [max(5.0, _LARGEST * accept_prob**0.5) for accept_prob in accept_probs],
            "color": COLOURS[0],
        },
    )
    edges = scatter(
        zip(edge_xs, edge_ys, strict=True), "lines", hoverinfo="skip", line={"color": MUTED}
    )
    layout = {
        "title": {
            "text": f"{escape(label)}: {len(depths) + sum(tree['probes'])} rows",
            "x": 0.01,
            "font": {"size": 14},
        },
        "showlegend": False,
        "xaxis": {"title": "Depth", "dtick": 1, "showgrid": False},
        "yaxis": {"visible": False, "autorange": "reversed"},
    }
    return figure_of([edges, nodes], layout, height=160 + 24 * round(max(heights) + 1))


def comparison_figures(compared: Sequence[PointComparison], labels: Sequence[str]) -> list[Figure]:
    """An interval for every point, in the given order: of its latency ratio, and of its quality
    difference.

    What was not compared of any point has no figure. labels: of the points.
    """
    metric = escape(compared[0].pair.a.quality.metric) if compared else ""
    latencies = [(comparison.latency_ratio, comparison.speed_verdict) for comparison in compared]
    qualities = [
        (comparison.quality.difference, comparison.quality.verdict) for comparison in compared
    ]
    latency_title = "Latency B/A<br>(left of the line B is faster)"
    quality_title = f"{metric}, B minus A<br>(right of the line B is better)"
    figures = [
        _intervals(latency_title, 1.0, latencies, labels),
        _intervals(quality_title, 0.0, qualities, labels),
    ]
    return [figure for figure in figures if figure["data"]]


def _intervals(
    title: str,
    equal: float,
    estimates: Sequence[tuple[Speedup | Difference | None, str]],
    labels: Sequence[str],
) -> Figure:
    """The estimates: filled marks are verdicts, rings may be chance. equal: where A equals B."""
    traces = [
        _interval_mark(estimate, verdict, row, is_ratio=equal != 0)
        for row, (estimate, verdict) in enumerate(estimates)
        if estimate is not None
    ]
    names = [_wrapped(label) for label in labels]
    layout = {
        "xaxis": {"title": title, "type": "log" if equal else "linear"},
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "range": [len(names) - 0.4, -0.6],
        },
        "showlegend": False,
        "meta": "rows",  # figures.js moves their names on a narrow screen
        "annotations": [],
        "shapes": [{**_DASHED, "yref": "paper", "x0": equal, "x1": equal, "y0": 0, "y1": 1}],
    }
    lines = sum(1 + name.count("<br>") for name in names)
    return figure_of(traces, layout, height=150 + 26 * len(names) + 10 * lines)


def _interval_mark(estimate: Speedup | Difference, verdict: str, row: int, is_ratio: bool) -> Trace:
    """One estimate with its interval, in this row. is_ratio: it is of latencies, not a difference."""
    value, low, high = estimate.value, estimate.low, estimate.high
    by_chance = verdict in (SAME, NOT_COMPARED, UNCLEAR, TOO_FEW)
    colour = MUTED
    if not by_chance:
        colour = _GOOD if verdict in ("faster", "better") else _BAD
    if is_ratio:
        words = f"{number(value, 3)} {interval(low, high, 3)}"
    else:
        digits = scale_of(estimate.metric).digits
        words = f"{signed(value, digits)} {interval(low, high, digits, signed)}"
    symbol = "circle-open" if by_chance else "circle"
    return scatter(
        [(value, row)],
        "markers",
        error_x=error_bars([(low, value, high)], colour),
        marker={"size": 9, "symbol": symbol, "color": colour},
        text=[f"{words}: {verdict}"],
        hovertemplate=HOVER,
    )


def _line(xs: Sequence[float | str], ys: Sequence[float | None], name: str, mark: Mark) -> Trace:
    """A line with the marks of a policy."""
    marker = {"symbol": mark.plotly_symbol, "size": 7, "color": mark.colour}
    line = {"color": mark.colour, "width": 1.8}
    return scatter(zip(xs, ys, strict=True), "lines+markers", name=name, line=line, marker=marker)


def _heights(parents: Sequence[int]) -> list[float]:
    """The place of each row from top to bottom: leaves one below the other, parents beside their
    children's middle.

    parents: the row of the parent of every row but the first; parents come before their children.
    """
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(row)
    leaf_counter, heights = count(), [0.0] * (len(parents) + 1)

    def set_height(row: int) -> float:
        child_heights = [set_height(child) for child in children.get(row, ())]
        if child_heights:
            heights[row] = (child_heights[0] + child_heights[-1]) / 2
        else:
            heights[row] = float(next(leaf_counter))
        return heights[row]

    set_height(0)
    return heights


def _wrapped(label: str) -> str:
    return "<br>".join(map(escape, textwrap.wrap(label, _LABEL)))


def _unique_labels(group: Group, results: Sequence[Result]) -> list[str]:
    """Wrapped labels of results; a repeated label would merge two bars into one, so it gets its
    point's hash.
    """
    labels: list[str] = []
    for result in results:
        label = _wrapped(group.label(result))
        labels.append(label if label not in labels else f"{label} {result.point}")
    return labels
