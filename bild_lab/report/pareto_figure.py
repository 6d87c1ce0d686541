"""The Pareto figure as a static image: quality against latency, one panel per setting (BiLD Figure
4).

Marks of the front have their place in it, from 1, as on the HTML page; a list below the picture
says what they are. A vector figure is as wide as a column of a paper and has no title; what its
caption must say is below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.path import Path as MatplotlibPath
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from bild_lab.errors import UserError
from bild_lab.lab.config.schemas import PICTURE_KINDS
from bild_lab.lab.schema.formatting import TIMES
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import Group, Position, by_setting
from bild_lab.report.pareto_layout import (
    COLUMN_LOOK,
    SCREEN_LOOK,
    PanelLook,
    beyond_lines,
    box_middle,
    caption_lines,
    free_place,
    front_list,
    heading_lines,
    inches_above,
    inches_below,
    numbered_places,
    setting_names,
    shortened,
)
from bild_lab.report.provenance import caption
from bild_lab.report.style import (
    HAIRLINE,
    INK,
    MUTED,
    VECTOR,
    Mark,
    front_corners,
    log_ticks,
    marks,
    speedups_on_axis,
    with_bars,
    written_figure,
)

_MARGIN = 2  # pixels beside an axis' title
_LEADER = 12  # pixels, beyond which a line leads from a mark to its number
_LONGEST_POLICY = 40  # letters of a policy in the legend
_LONGEST_BESIDE = 9  # letters of a line's name, which a longer one has inside the axes


@dataclass(frozen=True)
class _Panel:
    """One setting's part of the image. setting_name: what tells it from the others."""

    figure: SubFigure
    axes: Axes
    group: Group
    setting_name: str
    colours: dict[str, Mark]
    look: PanelLook


def draw_pareto(
    results: Sequence[Result], path: Path, kinds: Sequence[str] = PICTURE_KINDS
) -> None:
    """Draw quality against latency relative to the baseline, for a screen, for a paper or both.

    Results of different settings never share a panel: each further setting adds one below. path:
    without or with a suffix, which the kinds replace. kinds: "png" is 1200 pixels wide, "pdf" and
    "svg" are as wide as a column.

    Raises:
        UserError: no result has both a latency and a quality.
    """
    groups = by_setting(results)
    named = [
        (group, name)
        for group, name in zip(groups, setting_names(groups), strict=True)
        if any(group.position(result) for result in group.results)
    ]
    if not named:
        raise UserError(
            "a Pareto figure wants a point with latency and quality, got none; run a point first"
        )
    colours = marks(sorted({policy for group, _ in named for policy in group.policies}))
    for look in (SCREEN_LOOK, COLUMN_LOOK):
        look_kinds = [kind for kind in kinds if (kind in VECTOR) is not look.titled]
        if look_kinds:
            _draw_groups(named, colours, look, path, look_kinds)


def _draw_groups(
    named: Sequence[tuple[Group, str]],
    colours: dict[str, Mark],
    look: PanelLook,
    path: Path,
    kinds: Sequence[str],
) -> None:
    """One image: a panel for each setting, one below the other. named: each with what tells its
    setting.
    """
    heights = [
        inches_above(group, look, name) + look.height + inches_below(group, look, name)
        for group, name in named
    ]
    with written_figure(path, (look.width, sum(heights)), kinds) as figure:
        rows = figure.subfigures(len(named), squeeze=False, hspace=0, height_ratios=heights)
        for subfigure, (group, name), height in zip(rows[:, 0], named, heights, strict=True):
            axes = subfigure.add_axes(_axes_area(group, look, name, height))
            _draw_panel(_Panel(subfigure, axes, group, name, colours, look))


def _axes_area(
    group: Group, look: PanelLook, setting_name: str, height: float
) -> tuple[float, float, float, float]:
    """Left, bottom, width and height of the axes, in shares of the panel."""
    left, bottom, width, axes_height = look.area
    beyond = look.line * len(beyond_lines(group, look))
    bottom = bottom + inches_below(group, look, setting_name) + beyond
    axes_height = axes_height - beyond
    return (left / look.width, bottom / height, width / look.width, axes_height / height)


def _draw_panel(panel: _Panel) -> None:
    axes, group = panel.axes, panel.group
    axes.grid(color=HAIRLINE, linewidth=0.7)
    axes.set_axisbelow(True)
    _draw_points(panel)
    _frame(axes, group)
    if group.relative:
        _draw_baseline(panel)
        _draw_speedup_axis(panel)
    corners = front_corners(group)
    if len(corners) > 1:
        xs, ys = zip(*corners, strict=True)
        axes.step(xs, ys, where="post", color=INK, linewidth=1.3, alpha=0.7, zorder=3)
    _label_axes(panel)
    _draw_lines_below(panel)
    if panel.look.titled:
        _draw_heading(panel)
    _draw_legend(panel)
    _number_front(panel)


def _draw_points(panel: _Panel) -> None:
    """The marks; bars for the points that `with_bars` selects.

    Ends of bars have caps, as bars lie on each other.
    """
    group, look = panel.group, panel.look
    barred = {id(result) for result in with_bars(group, look.bars)}
    for result, position in reversed(group.placed):
        if result.is_baseline:  # it has its own mark
            continue
        mark = panel.colours[result.policy]
        if id(result) in barred:
            _draw_bars(panel.axes, position, mark.colour, look.mark)
        on_front = group.is_on_front(result)
        panel.axes.plot(
            position.x,
            position.y,
            mark.marker,
            ms=look.mark,
            mfc=mark.colour if on_front else "white",
            mec=mark.colour,
            mew=0.2 * look.mark,
            zorder=5 if on_front else 4,
        )


def _draw_bars(axes: Axes, position: Position, colour: str, size: float) -> None:
    """The intervals of a point. size: of its mark, in points."""
    left, right = position.x - position.x_low, position.x_high - position.x
    below, above = position.y - position.y_low, position.y_high - position.y
    axes.errorbar(
        position.x,
        position.y,
        xerr=[[max(0.0, left)], [max(0.0, right)]],
        yerr=[[max(0.0, below)], [max(0.0, above)]],
        fmt="none",
        ecolor=colour,
        elinewidth=0.13 * size,
        capsize=0.35 * size,
        capthick=0.13 * size,
        alpha=0.8,
        zorder=2,
    )


def _frame(axes: Axes, group: Group) -> None:
    horizontal, vertical = group.limits()
    axes.set_xlim(*horizontal)
    axes.set_ylim(*vertical)
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.ticklabel_format(axis="y", useOffset=False)
    if group.needs_log_axis:
        axes.set_xscale("log")
        axes.set_xticks(log_ticks(*horizontal), minor=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10]))


def _draw_baseline(panel: _Panel) -> None:
    axes, group, look = panel.axes, panel.group, panel.look
    quality = group.baseline_quality
    if quality is None:
        return
    for level, text, dashes, side in (  # one text above its line, one below: the lines may be close
        (quality, group.setting.baseline, "-", "bottom"),
        (quality - group.scale.small_loss, group.scale.loss_line, (0, (5, 4)), "top"),
    ):
        axes.axhline(level, color=MUTED, linewidth=1.0, linestyle=dashes, zorder=1.5)
        beside = look.titled and len(text) <= _LONGEST_BESIDE
        # a name within the axes stands above the baseline's own mark, which may be at their edge
        above_mark = look.mark if side == "bottom" and look.titled else 0.0
        offset = (6, 0) if beside else (-1, 1 + above_mark if side == "bottom" else -1.5)
        axes.annotate(
            text,
            (1, level),
            xytext=offset,
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="left" if beside else "right",
            va=side,
            color=MUTED,
            annotation_clip=False,
        )
    axes.plot(1.0, quality, "x", color=INK, ms=1.4 * look.mark, mew=0.37 * look.mark, zorder=6)


def _draw_speedup_axis(panel: _Panel) -> None:
    axes = panel.axes
    ticks = speedups_on_axis(panel.group, 13 if panel.look.titled else 8)
    top = axes.secondary_xaxis("top")
    top.set_xlabel("Speedup", labelpad=5)
    top.set_xticks([1 / tick for tick in ticks])
    top.xaxis.set_minor_locator(NullLocator())
    top.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{1 / x:.3g}{TIMES}"))
    top.spines["top"].set_visible(False)
    axes.spines["top"].set_visible(False)


def _label_axes(panel: _Panel) -> None:
    group, look = panel.group, panel.look
    unit = f"relative to {group.setting.baseline}" if group.relative else "in seconds"
    latency = f"Latency {unit}"
    if look.titled:
        latency = f"Latency per example, {unit} (further left is faster)"
    lines = [latency, *beyond_lines(group, look)]
    panel.axes.set_xlabel("\n".join(lines), labelpad=0.9 * look.mark)
    panel.axes.set_ylabel(group.metric)
    _keep_inside(panel)


def _keep_inside(panel: _Panel) -> None:
    """Begin the axes further right where their numbers are so long that the title of the vertical
    axis would leave the image.
    """
    outside = panel.figure.bbox.x0 - panel.axes.get_tightbbox().x0
    if outside > 0:
        left, bottom, width, height = panel.axes.get_position().bounds
        share = (outside + _MARGIN) / panel.figure.bbox.width
        panel.axes.set_position((left + share, bottom, width - share, height))


def _draw_heading(panel: _Panel) -> None:
    """The title, what was measured, and what cannot be relied on."""
    title, subtitle = heading_lines(panel.group, panel.setting_name)
    lines = [
        *((line, {"size": 11.5, "weight": "bold"}) for line in title),
        *((line, {"color": MUTED}) for line in subtitle),
        (caption(panel.group.results), {"color": INK}),  # left of the upper axis' title
    ]
    height, inches = _height(panel.figure), 0.24
    for place, (text, font) in enumerate(lines, start=1):
        if text:
            panel.figure.text(0.09, 1 - inches / height, text, va="center", **font)
        inches += 0.22 if place == len(title) else panel.look.line


def _draw_lines_below(panel: _Panel) -> None:
    """The list of the front, and below it what a caption must say."""
    group, look = panel.group, panel.look
    captions = caption_lines(group, look, panel.setting_name)
    height = _height(panel.figure)
    left = 0.09 if look.titled else 0.02
    style = {"va": "bottom", "linespacing": 1.15, "size": "small" if look.titled else "medium"}
    if captions:
        bottom = look.line / 4 / height
        panel.figure.text(left, bottom, "\n".join(captions), color=MUTED, **style)
    for index, line in enumerate(reversed(front_list(group, look))):
        bottom = look.line * (index + len(captions) + 0.35) / height
        panel.figure.text(left, bottom, line, color=INK, **style)


def _draw_legend(panel: _Panel) -> None:
    """The legend above the lines below a panel, with as few rows as fit into the image."""
    group, look = panel.group, panel.look
    handles = _legend_handles(panel)
    captions = caption_lines(group, look, panel.setting_name)
    text_lines = len(captions) + len(front_list(group, look))
    below = look.line * (0.5 + text_lines) / _height(panel.figure)
    for columns in range(len(handles), 0, -1):
        legend = panel.figure.legend(
            handles=handles,
            ncols=columns,
            loc="lower center",
            bbox_to_anchor=(0.495, 0.005 + below),
            frameon=False,
            columnspacing=1.6,
            handletextpad=0.4,
            borderpad=0,
            borderaxespad=0.2,
        )
        if columns == 1 or legend.get_window_extent().width <= 0.97 * panel.figure.bbox.width:
            return
        legend.remove()


def _legend_handles(panel: _Panel) -> list[Line2D]:
    """The entries of the legend: the baseline, the policies that are drawn, the front."""
    group, size = panel.group, panel.look.mark
    handles = []
    if group.relative:
        cross = _legend_mark("x", INK, group.setting.baseline)
        cross.set(markersize=1.2 * size, markeredgewidth=0.34 * size)
        handles.append(cross)
    drawn = {result.policy for result, _ in group.placed if not result.is_baseline}
    for policy, mark in panel.colours.items():
        if policy in drawn:
            handle = _legend_mark(mark.marker, mark.colour, shortened(policy, _LONGEST_POLICY))
            handle.set(markersize=size)
            handles.append(handle)
    front = "Pareto front (filled marks)" if panel.look.titled else "Pareto front"
    handles.append(Line2D([], [], color=INK, lw=0.2 * size, alpha=0.7, label=front))
    return handles


def _legend_mark(marker: str, colour: str, label: str) -> Line2D:
    return Line2D([], [], ls="", marker=marker, color=colour, label=label)


def _number_front(panel: _Panel) -> None:
    """Write the place in the front beside each listed mark.

    A number that is not close to its mark has a line to it.
    """
    group, axes, look = panel.group, panel.axes, panel.look
    radius = 0.5 * _pixels(panel, look.mark)
    centers = [axes.transData.transform((position.x, position.y)) for _, position in group.placed]
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in centers]
    lines, bounds = _obstacles(axes, group), axes.get_window_extent()
    for place in numbered_places(group, look):
        result = group.front[place - 1]
        if group.is_off_axis(result):
            continue
        position = group.position(result)
        text = axes.text(
            position.x,
            position.y,
            str(place),
            weight="bold",
            size="medium",
            ha="center",
            va="center",
            zorder=7,
        )
        anchor = axes.transData.transform((position.x, position.y))
        box = free_place(anchor, text.get_window_extent(), taken, lines, bounds, radius)
        if box is None:
            text.remove()
            continue
        taken.append(box)
        middle = box_middle(box)
        text.set_position(axes.transData.inverted().transform(middle))
        if math.dist(anchor, middle) > radius + _LEADER + box.height / 2:
            lines.append(MatplotlibPath([anchor, middle]))
            xs, ys = zip(*axes.transData.inverted().transform([anchor, middle]), strict=True)
            axes.plot(xs, ys, color=INK, linewidth=0.6, alpha=0.7, zorder=2.5)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9})


def _obstacles(axes: Axes, group: Group) -> list[MatplotlibPath]:
    """What numbers should avoid, in pixels: the front, its intervals, the horizontal lines."""
    lines = []
    corners = front_corners(group)
    if len(corners) > 1:
        steps = []
        for (x, y), (next_x, next_y) in pairwise(corners):
            steps += [(x, y), (next_x, y), (next_x, next_y)]
        lines.append(steps)
    for result in group.front:
        position = group.position(result)
        lines.append([(position.x_low, position.y), (position.x_high, position.y)])
        lines.append([(position.x, position.y_low), (position.x, position.y_high)])
    if group.relative and group.baseline_quality is not None:
        for loss in (0.0, group.scale.small_loss):
            level = group.baseline_quality - loss
            lines.append([(x, level) for x in axes.get_xlim()])
    return [MatplotlibPath(axes.transData.transform(line)) for line in lines]


def _pixels(panel: _Panel, points: float) -> float:
    """The pixels of a size in points, 72 of which are an inch."""
    return points * panel.figure.dpi / 72


def _height(subfigure: SubFigure) -> float:
    """Inches of a panel with what is below it."""
    return subfigure.bbox.height / subfigure.dpi
