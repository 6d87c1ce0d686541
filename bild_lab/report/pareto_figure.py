"""The Pareto figure as a static image: quality against latency, one panel per setting (BiLD Figure
4).

Marks of the front have their place in it, from 1, as on the HTML page; a list below the picture
says what they are. A vector figure is as wide as a column of a paper and has no title; what its
caption must say is below it.
"""

from __future__ import annotations

import math
import textwrap
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
from bild_lab.lab.config.schemas import PICTURE_KINDS
from bild_lab.lab.schema.formatting import MINUS, TIMES, short_name
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import FEW, Group, by_setting, setting_title
from bild_lab.report.headline import front_in_words, sizes
from bild_lab.report.provenance import caption
from bild_lab.report.style import (
    COLUMN,
    HAIRLINE,
    INK,
    MUTED,
    VECTOR,
    Mark,
    beyond_axis,
    front_corners,
    log_ticks,
    marks,
    speedups_on_axis,
    with_bars,
    written_figure,
)


@dataclass(frozen=True)
class _Look:
    """Sizes of a panel, on a screen or in a column of a paper.

    inches: width, and height without what is below. area: of the axes in it. titled: with a
    heading, and names of lines beside the axes. mark: its diameter in points. listed: at most so
    many points of the front. bars: of at most so many points all. axis: inches for the axis' title.
    line: of a line of text below. letters: on such a line.
    """

    inches: tuple[float, float]
    area: tuple[float, float, float, float]
    titled: bool
    mark: float
    listed: int
    bars: int
    axis: float
    line: float
    letters: int


_SCREEN = _Look((8.0, 4.1), (0.72, 0.13, 6.48, 2.9), True, 6.5, 12, FEW, 0.55, 0.18, 122)
_COLUMN = _Look((COLUMN, 2.35), (0.45, 0.33, 2.6, 1.6), False, 3.6, 8, 6, 0.0, 0.125, 66)
_DISTANCES = (3, 6, 10, 15, 22, 30, 40, 52)  # pixels between a mark and its number
_ANGLES = (225, 315, 135, 45, 270, 90, 180, 0, 200, 340, 160, 20)  # degrees
_LED = 12  # pixels, beyond which a line leads from a mark to its number

XY = tuple[float, float]  # in pixels


@dataclass(frozen=True)
class _Panel:
    """One setting's part of the image."""

    figure: SubFigure
    axes: Axes
    group: Group
    colours: dict[str, Mark]
    look: _Look


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
    groups = [
        group
        for group in by_setting(results)
        if any(group.position(result) for result in group.results)
    ]
    if not groups:
        raise UserError(
            "a Pareto figure wants a point with latency and quality, got none; run a point first"
        )
    colours = marks(sorted({policy for group in groups for policy in group.policies}))
    for look in (_SCREEN, _COLUMN):
        if not (chosen := [kind for kind in kinds if (kind in VECTOR) is not look.titled]):
            continue
        across, up = look.inches
        below = [_below(group, look) for group in groups]
        heights = [up + each for each in below]
        with written_figure(path, (across, sum(heights)), chosen) as figure:
            parts = figure.subfigures(len(groups), squeeze=False, hspace=0, height_ratios=heights)[
                :, 0
            ]
            for part, group, height, room in zip(parts, groups, heights, below, strict=True):
                left, bottom, width, tall = look.area
                more = look.line * len(_beyond(group, look))
                bottom, tall = bottom + room + more, tall - more
                area = (left / across, bottom / height, width / across, tall / height)
                _draw_panel(_Panel(part, part.add_axes(area), group, colours, look))


def _below(group: Group, look: _Look) -> float:
    """Inches below a panel: the axis' title, the legend, the list of the front and what a caption
    must say.
    """
    lines = (
        1.5 + 1.2 * _legend_rows(group, look) + len(_listed(group, look)) + len(_foot(group, look))
    )
    return look.axis + look.line * lines


def _legend_rows(group: Group, look: _Look) -> int:
    """Rows of the legend, at most: an entry takes as much as its letters and the mark."""
    letters = max(len(policy) + 6 for policy in [*group.policies, "Pareto front"])
    return math.ceil((len(group.policies) + 2) / max(1, look.letters // letters))


def _listed(group: Group, look: _Look) -> list[str]:
    """A line for each numbered point of the front:

    `1 bild (fallback 0.5): 1.62× [1.56, 1.68], BLEU 82.40, −6.88 …`.
    """
    front, numbered = front_in_words(group, bounds=look.titled), _numbered(group, look)
    lines = []
    for place in numbered:
        result, label, numbers = front[place - 1]
        if any(result is outside for outside in group.off_axis):
            numbers += "; beyond the axis"
        lines += _list_entry(f"{place}  {label}", numbers, look.letters)
    if len(numbered) < len(front):
        lines.append(f"and {len(front) - len(numbered)} more on the front, in the report")
    return lines


def _list_entry(named: str, numbers: str, letters: int) -> list[str]:
    """A point's name and numbers on one line, or on two; what is too long for a line ends in an
    ellipsis.
    """
    if len(named) + len(numbers) + 2 <= letters:
        return [f"{named}: {numbers}"]
    return [_shortened(f"{named}:", letters), _shortened(f"     {numbers}", letters)]


def _shortened(line: str, letters: int) -> str:
    return line if len(line) <= letters else f"{line[: letters - 1]}…"


def _numbered(group: Group, look: _Look) -> list[int]:
    """The places in the front, from 1, of the points that have a number: evenly over the front,
    with both ends.
    """
    count = len(group.front())
    if count <= look.listed:
        return list(range(1, count + 1))
    return [1 + round(place * (count - 1) / (look.listed - 1)) for place in range(look.listed)]


def _beyond(group: Group, look: _Look) -> list[str]:
    """Lines that name what is beyond the axis."""
    return textwrap.wrap(beyond_axis(group), look.letters - 8)


def _foot(group: Group, look: _Look) -> list[str]:
    """Lines below a figure in a column: what was measured, and how far it can be relied on."""
    if look.titled:
        return []
    setting = group.setting
    said = [
        f"{setting_title(setting)}, {setting.dtype}, {setting.hardware or setting.device}",
        sizes(group.results),
    ]
    said += [f"bars: 95 % intervals{' of some points' if len(group.results) > look.bars else ''}"]
    return textwrap.wrap(
        "; ".join(filter(None, [*said, caption(group.results)])) + ".", look.letters - 3
    )


def _draw_panel(panel: _Panel) -> None:
    panel.axes.grid(color=HAIRLINE, linewidth=0.7)
    panel.axes.set_axisbelow(True)
    _draw_points(panel)
    _frame(panel.axes, panel.group)
    if panel.group.relative:
        _draw_baseline(panel)
        _draw_speedup_axis(panel)
    front = front_corners(panel.group)
    if len(front) > 1:
        panel.axes.step(
            *zip(*front, strict=True), where="post", color=INK, linewidth=1.3, alpha=0.7, zorder=3
        )
    _draw_texts(panel)
    _draw_legend(panel)
    _number_front(panel)


def _draw_points(panel: _Panel) -> None:
    """The marks; bars for the points that `with_bars` selects.

    Ends of bars have caps, as bars lie on each other.
    """
    look, front = panel.look, {id(result) for result in panel.group.front()}
    barred = {id(result) for result in with_bars(panel.group, look.bars)}
    for result, position in reversed(panel.group.placed):
        if result.is_baseline:  # it has its own mark
            continue
        mark = panel.colours[result.policy]
        chosen = id(result) in front
        if id(result) in barred:
            panel.axes.errorbar(
                position.x,
                position.y,
                xerr=[
                    [max(0.0, position.x - position.x_low)],
                    [max(0.0, position.x_high - position.x)],
                ],
                yerr=[
                    [max(0.0, position.y - position.y_low)],
                    [max(0.0, position.y_high - position.y)],
                ],
                fmt="none",
                ecolor=mark.colour,
                elinewidth=0.13 * look.mark,
                capsize=0.35 * look.mark,
                capthick=0.13 * look.mark,
                alpha=0.8,
                zorder=2,
            )
        fill = mark.colour if chosen else "white"
        order = 5 if chosen else 4
        edge = {"mfc": fill, "mec": mark.colour, "mew": 0.2 * look.mark}
        panel.axes.plot(position.x, position.y, mark.marker, ms=look.mark, zorder=order, **edge)


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
        (quality - 1, f"{MINUS}1 point", (0, (5, 4)), "top"),
    ):
        axes.axhline(level, color=MUTED, linewidth=1.0, linestyle=dashes, zorder=1.5)
        position = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        place = (
            {"xytext": (6, 0)}
            if look.titled
            else {"xytext": (-1, 1 if side == "bottom" else -1.5), "ha": "right"}
        )
        axes.annotate(
            text, (1, level), **place, **position, va=side, color=MUTED, annotation_clip=False
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


def _draw_texts(panel: _Panel) -> None:
    group, setting, part = panel.group, panel.group.setting, panel.figure
    unit = f"relative to {setting.baseline}" if group.relative else "in seconds"
    words = (
        f"Latency per example, {unit} (further left is faster)"
        if panel.look.titled
        else f"Latency {unit}"
    )
    panel.axes.set_xlabel(
        "\n".join([words, *_beyond(group, panel.look)]), labelpad=0.9 * panel.look.mark
    )
    panel.axes.set_ylabel(group.metric)
    _draw_lines_below(panel)
    if not panel.look.titled:
        return
    data = f"{short_name(setting.dataset)} ({setting.split})"
    title = f"{short_name(setting.target)} on {data}: {group.metric} against latency"
    draft = f"drafter {short_name(setting.draft)}, " if setting.draft else ""
    measured = f"{draft}{setting.n_examples} examples, {setting.dtype} on {setting.device}"
    bars = f"speedup and difference in {group.metric}" if group.relative else group.metric
    subtitle = f"{measured}. Bars: 95 % intervals of {bars}."
    for inches, text, font in (
        (0.24, title, {"size": 11.5, "weight": "bold"}),
        (0.46, subtitle, {"color": MUTED}),
        (0.64, caption(group.results), {"color": INK}),  # left of the upper axis' title
    ):
        if text:
            part.text(0.09, 1 - inches / _height(part), text, va="center", **font)


def _draw_lines_below(panel: _Panel) -> None:
    """The list of the front, and below it what a caption must say."""
    part, look, group = panel.figure, panel.look, panel.group
    foot, listed = _foot(group, look), _listed(group, look)
    left = 0.09 if look.titled else 0.02
    style = {"va": "bottom", "linespacing": 1.15, "size": "small" if look.titled else "medium"}
    if foot:
        part.text(left, look.line / 4 / _height(part), "\n".join(foot), color=MUTED, **style)
    for number, line in enumerate(reversed(listed)):
        bottom = look.line * (number + len(foot) + 0.35) / _height(part)
        part.text(left, bottom, line, color=INK, **style)


def _draw_legend(panel: _Panel) -> None:
    front = f"Pareto front{' (filled marks)' if panel.look.titled else ''}"
    size, drawn = (
        panel.look.mark,
        {one.policy for one, _ in panel.group.placed if not one.is_baseline},
    )
    handles = [
        Line2D(
            [],
            [],
            ls="",
            marker=mark.marker,
            ms=size,
            mfc=mark.colour,
            mec=mark.colour,
            label=_shortened(policy, 40),
        )
        for policy, mark in panel.colours.items()
        if policy in drawn
    ]
    if panel.group.relative:
        baseline = panel.group.setting.baseline
        handles.insert(
            0,
            Line2D(
                [], [], ls="", marker="x", ms=1.2 * size, mew=0.34 * size, color=INK, label=baseline
            ),
        )
    handles.append(Line2D([], [], color=INK, lw=0.2 * size, alpha=0.7, label=front))
    lines = len(_foot(panel.group, panel.look)) + len(_listed(panel.group, panel.look))
    below = panel.look.line * (0.5 + lines) / _height(panel.figure)
    location = {"loc": "lower center", "bbox_to_anchor": (0.495, 0.005 + below)}
    for columns in range(len(handles), 0, -1):  # as few rows as fit into the image
        look = {
            "frameon": False,
            "columnspacing": 1.6,
            "handletextpad": 0.4,
            "borderpad": 0,
            "borderaxespad": 0.2,
        }
        legend = panel.figure.legend(handles=handles, ncols=columns, **location, **look)
        if columns == 1 or legend.get_window_extent().width <= 0.97 * panel.figure.bbox.width:
            return
        legend.remove()


def _number_front(panel: _Panel) -> None:
    """Write the place in the front beside each listed mark.

    A number that is not close to its mark has a line to it.
    """
    group, axes, look = panel.group, panel.axes, panel.look
    front, outside = group.front(), set(map(id, group.off_axis))
    places, room = (
        [axes.transData.transform((at.x, at.y)) for _, at in group.placed],
        0.5 * _pixels(panel, look.mark),
    )
    taken = [Bbox.from_extents(x - room, y - room, x + room, y + room) for x, y in places]
    lines, bounds = _lines(axes, group), axes.get_window_extent()
    for place in _numbered(group, look):
        result = front[place - 1]
        if id(result) in outside:
            continue
        at = group.position(result)
        text = axes.text(
            at.x, at.y, str(place), weight="bold", size="medium", ha="center", va="center", zorder=7
        )
        anchor = axes.transData.transform((at.x, at.y))
        box = free_place(anchor, text.get_window_extent(), taken, lines, bounds, room)
        if box is None:
            text.remove()
            continue
        taken.append(box)
        middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        text.set_position(axes.transData.inverted().transform(middle))
        if math.dist(anchor, middle) > room + _LED + box.height / 2:
            lines.append(MatplotlibPath([anchor, middle]))
            ends = axes.transData.inverted().transform([anchor, middle])
            axes.plot(*zip(*ends, strict=True), color=INK, linewidth=0.6, alpha=0.7, zorder=2.5)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9})


def _pixels(panel: _Panel, points: float) -> float:
    """The pixels of a size in points, 72 of which are an inch."""
    return points * panel.figure.dpi / 72


def _height(part: SubFigure) -> float:
    """Inches of a panel with what is below it."""
    return part.bbox.height / part.dpi


def free_place(
    anchor: XY,
    label: Bbox,
    taken: Sequence[Bbox],
    lines: Sequence[MatplotlibPath],
    bounds: Bbox,
    room: float,
) -> Bbox | None:
    """The nearest place for a label that covers no other box and stays inside the bounds, in
    pixels; None without one.

    It is nearer to its own mark than to any other, avoids lines, and is not led to across another
    box, as far as that is possible. room: from the middle of the mark to its edge.
    """
    best, fewest = None, math.inf
    for distance, angle in product(_DISTANCES, _ANGLES):
        right, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        # pushed out until the nearest edge, not the center, is so far from the mark
        away = distance + room
        x, y = (
            anchor[0] + right * (away + label.width / 2),
            anchor[1] + up * (away + label.height / 2),
        )
        box = Bbox.from_bounds(
            x - label.width / 2, y - label.height / 2, label.width, label.height
        ).padded(1)
        inside = (
            bounds.x0 <= box.x0
            and box.x1 <= bounds.x1
            and bounds.y0 <= box.y0
            and box.y1 <= bounds.y1
        )
        if not inside or box.count_overlaps(taken):
            continue
        faults = _faults(anchor, (x, y), box, taken, lines)
        if not faults:
            return box
        if faults < fewest:
            best, fewest = box, faults
    return best


def _faults(
    anchor: XY, middle: XY, box: Bbox, taken: Sequence[Bbox], lines: Sequence[MatplotlibPath]
) -> int:
    """How badly a label lies that covers nothing: worst beside another mark, then led across one,
    then on a line.
    """
    leader = MatplotlibPath([anchor, middle])
    others = [one for one in taken if not one.contains(*anchor)]
    reach = math.dist(anchor, middle)
    beside = any(
        math.dist(((one.x0 + one.x1) / 2, (one.y0 + one.y1) / 2), middle) < reach for one in others
    )
    across = any(leader.intersects_bbox(one, filled=False) for one in others)
    return 4 * beside + 2 * across + any(line.intersects_bbox(box, filled=False) for line in lines)


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
