"""The Pareto figure as a static image: quality against latency, one panel per setting (BiLD Figure 4).

Front points have their knobs beside them where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.path import Path as MatplotlibPath
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from bild_lab.errors import UserError
from bild_lab.lab.formatting import MINUS, TIMES, knob_label, short_name
from bild_lab.lab.results.groups import Group, by_setting
from bild_lab.lab.schema.result import Result
from bild_lab.report.provenance import caption
from bild_lab.report.style import (
    HAIRLINE,
    INK,
    MUTED,
    Mark,
    front_corners,
    log_ticks,
    marks,
    speedups_on_axis,
    with_bars,
    written_figure,
)

_PANEL_INCHES = (8.0, 5.0)
_LABELS_AT_MOST = 6
_DISTANCES = (14, 24, 36, 52, 70, 92)  # pixels
_ANGLES = (45, 135, 90, 315, 225, 270, 0, 180, 20, 160, 70, 110)  # degrees

XY = tuple[float, float]  # in pixels


@dataclass(frozen=True)
class _Panel:
    """One setting's part of the image."""

    figure: SubFigure
    axes: Axes
    group: Group
    colours: dict[str, Mark]


def draw_pareto(results: Sequence[Result], path: Path) -> None:
    """Draw quality against latency relative to the baseline: a PNG of 1200 x 750 pixels, and a PDF for a paper.

    Results of different settings never share a panel: each further setting adds one below. path: of the PNG.

    Raises:
        UserError: no result has both a latency and a quality.
    """
    groups = [group for group in by_setting(results) if any(group.position(result) for result in group.results)]
    if not groups:
        raise UserError("a Pareto figure wants a point with latency and quality, got none; run a point first")
    colours = marks(sorted({policy for group in groups for policy in group.policies}))
    across, up = _PANEL_INCHES
    with written_figure(path, (across, up * len(groups)), ("png", "pdf")) as figure:
        parts = figure.subfigures(len(groups), squeeze=False, hspace=0)[:, 0]
        for part, group in zip(parts, groups, strict=True):
            _draw_panel(_Panel(part, part.add_axes((0.09, 0.205, 0.81, 0.58)), group, colours))


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
    """The marks; bars for the points that `with_bars` selects."""
    front = {id(result) for result in panel.group.front()}
    barred = {id(result) for result in with_bars(panel.group)}
    for result in reversed(panel.group.results):
        position = panel.group.position(result)
        if position is None or result.is_baseline:  # it has its own mark
            continue
        mark = panel.colours[result.policy]
        chosen = id(result) in front
        if id(result) in barred:
            panel.axes.errorbar(
                position.x,
                position.y,
                xerr=[[max(0.0, position.x - position.x_low)], [max(0.0, position.x_high - position.x)]],
                yerr=[[max(0.0, position.y - position.y_low)], [max(0.0, position.y_high - position.y)]],
                fmt="none",
                ecolor=mark.colour,
                elinewidth=0.9,
                zorder=2,
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
    for level, text, dashes, side in (  # one text above its line, one below: the lines may be close
        (quality, group.setting.baseline, "-", "bottom"),
        (quality - 1, f"{MINUS}1 point", (0, (5, 4)), "top"),
    ):
        axes.axhline(level, color=MUTED, linewidth=1.0, linestyle=dashes, zorder=1.5)
        position = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(text, (1, level), (6, 0), **position, va=side, color=MUTED, annotation_clip=False)
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
            panel.figure.text(0.09, share, text, va="center", **font)


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
    location = {"loc": "lower center", "bbox_to_anchor": (0.495, 0.005)}
    for columns in range(len(handles), 0, -1):  # as few rows as fit into the image
        look = {"frameon": False, "columnspacing": 1.6, "handletextpad": 0.4}
        legend = panel.figure.legend(handles=handles, ncols=columns, **location, **look)
        if columns == 1 or legend.get_window_extent().width <= 0.97 * panel.figure.bbox.width:
            return
        legend.remove()


def _label_front(panel: _Panel) -> None:
    """Write the knobs of some front points beside them, if there is room."""
    group, axes = panel.group, panel.axes
    front = [result for result in group.front() if knob_label(result, group.knobs(result))]
    if len(front) > _LABELS_AT_MOST:  # evenly over the front, with both its ends
        front = [front[round(at * (len(front) - 1) / (_LABELS_AT_MOST - 1))] for at in range(_LABELS_AT_MOST)]
    placed = [at for result in group.results if (at := group.position(result)) is not None]
    taken = [Bbox.from_extents(x - 9, y - 9, x + 9, y + 9) for x, y in (_pixel(axes, at.x, at.y) for at in placed)]
    for result in front:
        at = group.position(result)
        label = knob_label(result, group.knobs(result), "\n")
        text = axes.text(at.x, at.y, label, size=7.5, ha="center", va="center", zorder=7)
        anchor = _pixel(axes, at.x, at.y)
        box = free_place(anchor, text.get_window_extent(), taken, _lines(axes, group), axes.get_window_extent())
        if box is None:
            text.remove()
            continue
        taken.append(box)
        center = axes.transData.inverted().transform(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))
        text.set_position(center)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9})
        axes.plot((at.x, center[0]), (at.y, center[1]), color=MUTED, linewidth=0.6, alpha=0.7, zorder=2.5)


def free_place(
    anchor: XY, label: Bbox, taken: Sequence[Bbox], lines: Sequence[MatplotlibPath], bounds: Bbox
) -> Bbox | None:
    """The nearest place for a label that covers no other box and stays inside the bounds, in pixels; None without one.

    It avoids lines if it can.
    """
    crossing = None
    for distance, angle in product(_DISTANCES, _ANGLES):
        right, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        # pushed out until the nearest edge, not the center, is so far from the anchor
        x, y = anchor[0] + right * (distance + label.width / 2), anchor[1] + up * (distance + label.height / 2)
        box = Bbox.from_bounds(x - label.width / 2, y - label.height / 2, label.width, label.height).padded(3)
        inside = bounds.x0 <= box.x0 and box.x1 <= bounds.x1 and bounds.y0 <= box.y0 and box.y1 <= bounds.y1
        if not inside or box.count_overlaps(taken):
            continue
        if not any(line.intersects_bbox(box, filled=False) for line in lines):
            return box
        crossing = crossing or box
    return crossing


def _lines(axes: Axes, group: Group) -> list[MatplotlibPath]:
    """What labels should avoid, in pixels: the front, its intervals, the horizontal lines."""
    steps = [corner for a, b in pairwise(front_corners(group)) for corner in (a, (b[0], a[1]), b)]
    lines = [steps] if steps else []
    for at in (group.position(result) for result in group.front()):
        lines += [[(at.x_low, at.y), (at.x_high, at.y)], [(at.x, at.y_low), (at.x, at.y_high)]]
    if group.relative and group.baseline_quality is not None:
        levels = (group.baseline_quality, group.baseline_quality - 1)
        lines += [[(x, level) for x in axes.get_xlim()] for level in levels]
    return [MatplotlibPath(axes.transData.transform(line)) for line in lines]


def _pixel(axes: Axes, x: float, y: float) -> XY:
    across, up = axes.transData.transform((x, y))
    return float(across), float(up)
