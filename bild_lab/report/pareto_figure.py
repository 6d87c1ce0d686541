"""The Pareto figure as a static image: quality against latency, one panel per setting (BiLD Figure 4)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.formatting import MINUS, TIMES, knob_label, short_name
from bild_lab.lab.results.groups import Group, by_setting
from bild_lab.lab.schema.result import Result
from bild_lab.report.axes import front_corners, log_ticks, speedups_on_axis
from bild_lab.report.bars import cut_at, with_bars
from bild_lab.report.labels import Box, place_labels, segment_boxes
from bild_lab.report.provenance import caption
from bild_lab.report.style import FIGURE_STYLE, HAIRLINE, INK, MUTED, Mark, marks

_PANEL_INCHES = (8.0, 5.0)
_DPI = 150
_LABELS_AT_MOST = 6
_ARROWS = {"left": "<", "right": ">", "down": "v", "up": "^"}


@dataclass(frozen=True)
class _Panel:
    """One setting's part of the image: `bottom` and `height` are shares of the whole."""

    figure: Figure
    axes: Axes
    group: Group
    colours: dict[str, Mark]
    bottom: float
    height: float


def draw_pareto(results: Sequence[Result], path: Path) -> None:
    """Draw quality against latency relative to the baseline, and write it as a PNG of 1200 x 750 pixels.

    Results of different settings never share a panel: each further setting adds one below.

    Raises:
        UserError: no result has both a latency and a quality.
    """
    groups = [group for group in by_setting(results) if any(group.position(result) for result in group.results)]
    if not groups:
        raise UserError("a Pareto figure wants a point with latency and quality, got none; run a point first")
    colours = marks(sorted({policy for group in groups for policy in group.policies}))
    height = 1 / len(groups)
    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(_PANEL_INCHES[0], _PANEL_INCHES[1] * len(groups)), dpi=_DPI)
        canvas = FigureCanvasAgg(figure)
        for row, group in enumerate(groups, start=1):
            bottom = 1 - row * height
            axes = figure.add_axes((0.09, bottom + 0.205 * height, 0.81, 0.58 * height))
            _draw_panel(_Panel(figure, axes, group, colours, bottom, height))
        image = io.BytesIO()
        canvas.print_png(image)
    write_atomically(path, image.getvalue())


def _draw_panel(panel: _Panel) -> None:
    panel.axes.grid(color=HAIRLINE, linewidth=0.7)
    panel.axes.set_axisbelow(True)
    _draw_points(panel)
    _frame(panel.axes, panel.group)
    if panel.group.relative:
        _draw_baseline(panel.axes, panel.group)
        _draw_speedup_axis(panel.axes, panel.group)
    front = front_corners(panel.group)
    if len(front) > 1:
        panel.axes.step(*zip(*front, strict=True), where="post", color=INK, linewidth=1.3, alpha=0.7, zorder=3)
    _draw_texts(panel)
    _draw_legend(panel)
    _label_front(panel)


def _draw_points(panel: _Panel) -> None:
    """The marks; bars and arrows where bars are cut for the points that `with_bars` selects."""
    front = {id(result) for result in panel.group.front()}
    barred = {id(result) for result in with_bars(panel.group)}
    limits = panel.group.limits()
    for result in reversed(panel.group.results):
        position = panel.group.position(result)
        if position is None or result.is_baseline:  # it has its own mark
            continue
        mark = panel.colours[result.policy]
        chosen = id(result) in front
        if id(result) in barred:
            at, cuts = cut_at(position, limits)
            panel.axes.errorbar(
                at.x,
                at.y,
                xerr=[[max(0.0, at.x - at.x_low)], [max(0.0, at.x_high - at.x)]],
                yerr=[[max(0.0, at.y - at.y_low)], [max(0.0, at.y_high - at.y)]],
                fmt="none",
                ecolor=mark.colour,
                elinewidth=0.9,
                zorder=2,
            )
            for each in cuts:
                panel.axes.plot(
                    each.x, each.y, _ARROWS[each.direction], color=mark.colour, ms=4.5, clip_on=False, zorder=3
                )
        fill = mark.colour if chosen else "white"
        order = 5 if chosen else 4
        panel.axes.plot(position.x, position.y, mark.marker, ms=6.5, mfc=fill, mec=mark.colour, mew=1.3, zorder=order)


def _frame(axes: Axes, group: Group) -> None:
    horizontal, vertical = group.limits()
    axes.set_xlim(*horizontal)
    axes.set_ylim(*vertical)
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.ticklabel_format(axis="y", useOffset=False)
    if group.wide:
        axes.set_xscale("log")
        axes.set_xticks(log_ticks(*horizontal), minor=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10]))


def _draw_baseline(axes: Axes, group: Group) -> None:
    quality = group.baseline_quality
    if quality is None:
        return
    for level, text, dashes in (
        (quality, group.setting.baseline, "-"),
        (quality - 1, f"{MINUS}1 point", (0, (5, 4))),
    ):
        axes.axhline(level, color=MUTED, linewidth=1.0, linestyle=dashes, zorder=1.5)
        position = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(text, (1, level), (6, 0), **position, va="center", color=MUTED, annotation_clip=False)
    axes.plot(1.0, quality, "x", color=INK, ms=9, mew=2.4, zorder=6)


def _draw_speedup_axis(axes: Axes, group: Group) -> None:
    ticks = speedups_on_axis(group)
    top = axes.secondary_xaxis("top")
    top.set_xlabel("Speedup", labelpad=5)
    top.set_xticks([1 / tick for tick in ticks])
    top.xaxis.set_minor_locator(NullLocator())
    top.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{1 / x:.3g}{TIMES}"))
    top.spines["top"].set_visible(False)
    axes.spines["top"].set_visible(False)


def _draw_texts(panel: _Panel) -> None:
    group, setting = panel.group, panel.group.setting
    unit = f"relative to {setting.baseline}" if group.relative else "in seconds"
    panel.axes.set_xlabel(f"Latency per example, {unit} (further left is faster)", labelpad=6)
    panel.axes.set_ylabel(group.metric)
    data = f"{short_name(setting.dataset)} ({setting.split})"
    title = f"{short_name(setting.target)} on {data}: {group.metric} against latency"
    draft = f"drafter {short_name(setting.draft)}, " if setting.draft else ""
    measured = f"{draft}{setting.n_examples} examples, {setting.dtype} on {setting.device}"
    bars = f"speedup and difference in {group.metric}" if group.relative else group.metric
    subtitle = f"{measured}. Bars: 95 % intervals of {bars}."
    for share, text, font in (
        (0.952, title, {"size": 11.5, "weight": "bold"}),
        (0.908, subtitle, {"color": MUTED}),
        (0.872, caption(group.results), {"color": INK}),  # left of the upper axis' title
    ):
        if text:
            panel.figure.text(0.09, panel.bottom + share * panel.height, text, va="center", **font)


def _draw_legend(panel: _Panel) -> None:
    shown = {policy: panel.colours[policy] for policy in panel.group.policies}
    handles = [
        Line2D([], [], ls="", marker=mark.marker, ms=6.5, mfc=mark.colour, mec=mark.colour, label=policy)
        for policy, mark in shown.items()
    ]
    if panel.group.relative:
        baseline = panel.group.setting.baseline
        handles.insert(0, Line2D([], [], ls="", marker="x", ms=8, mew=2.2, color=INK, label=baseline))
    handles.append(Line2D([], [], color=INK, lw=1.3, alpha=0.7, label="Pareto front (filled marks)"))
    location = {"loc": "lower center", "bbox_to_anchor": (0.495, panel.bottom + 0.005 * panel.height)}
    for columns in range(len(handles), 0, -1):  # as few rows as fit into the image
        look = {"frameon": False, "columnspacing": 1.6, "handletextpad": 0.4}
        legend = panel.figure.legend(handles=handles, ncols=columns, **location, **look)
        if columns == 1 or legend.get_window_extent().width <= 0.97 * panel.figure.bbox.width:
            return
        legend.remove()


def _label_front(panel: _Panel) -> None:
    """Write the knobs of some front points beside them, if there is room."""
    group, axes = panel.group, panel.axes
    chosen = _spread([result for result in group.front() if knob_label(result, group.knobs(result))])
    if not chosen:
        return
    texts = [
        axes.text(0, 0, knob_label(result, group.knobs(result), "\n"), size=7.5, ha="center", va="center", zorder=7)
        for result in chosen
    ]
    sizes = [(box.width, box.height) for box in (text.get_window_extent() for text in texts)]
    anchors = [_pixel(axes, group, result) for result in chosen]
    hard = [(x - 9, y - 9, x + 9, y + 9) for x, y in (_pixel(axes, group, result) for result in group.results)]
    centers = place_labels(anchors, sizes, hard, _lines(axes, group), axes.get_window_extent().extents)
    for text, anchor, center in zip(texts, anchors, centers, strict=True):
        if center is None:
            text.remove()
            continue
        text.set_position(axes.transData.inverted().transform(center))
        ends = axes.transData.inverted().transform([anchor, center])
        axes.plot(*ends.T, color=MUTED, linewidth=0.6, alpha=0.7, zorder=2.5)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9})


def _lines(axes: Axes, group: Group) -> list[Box]:
    """Cover with boxes what labels should avoid: the front, its intervals, the horizontal lines."""
    segments = []
    for (x, y), (next_x, next_y) in pairwise(front_corners(group)):
        segments += [((x, y), (next_x, y)), ((next_x, y), (next_x, next_y))]
    for result in group.front():
        at = group.position(result)
        segments += [((at.x_low, at.y), (at.x_high, at.y)), ((at.x, at.y_low), (at.x, at.y_high))]
    if group.relative and group.baseline_quality is not None:
        levels = (group.baseline_quality, group.baseline_quality - 1)
        segments += [((axes.get_xlim()[0], level), (axes.get_xlim()[1], level)) for level in levels]
    pixels = [axes.transData.transform(segment) for segment in segments]
    return [box for start, end in pixels for box in segment_boxes(tuple(start), tuple(end))]


def _pixel(axes: Axes, group: Group, result: Result) -> tuple[float, float]:
    at = group.position(result)
    x, y = axes.transData.transform((at.x, at.y)) if at is not None else (-1e6, -1e6)
    return float(x), float(y)


def _spread(front: list[Result]) -> list[Result]:
    """Choose at most six results, evenly over the front and with both its ends."""
    if len(front) <= _LABELS_AT_MOST:
        return front
    return [front[round(index * (len(front) - 1) / (_LABELS_AT_MOST - 1))] for index in range(_LABELS_AT_MOST)]
