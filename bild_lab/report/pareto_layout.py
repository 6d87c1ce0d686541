"""The sizes of a panel of the Pareto figure, the lines of text below it, and the places of the
numbers beside its marks.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from matplotlib.path import Path as MatplotlibPath
from matplotlib.transforms import Bbox

from bild_lab.lab.schema.formatting import counted, short_name, shortened
from bild_lab.lab.store.groups import FEW, Group, setting_title
from bild_lab.report.phrases import front_in_words, model_sizes, setting_words
from bild_lab.report.provenance import caption
from bild_lab.report.style import COLUMN, beyond_axis

XY = tuple[float, float]  # in pixels

_TITLE_LETTERS, _SUBTITLE_LETTERS = 72, 108  # on a line of the heading
_DISTANCES = (3, 6, 10, 15, 22, 30, 40, 52)  # pixels between a mark and its label
_ANGLES = (225, 315, 135, 45, 270, 90, 180, 0, 200, 340, 160, 20)  # degrees


@dataclass(frozen=True, kw_only=True)
class PanelLook:
    """Sizes of a panel, on a screen or in a column of a paper.

    width, height: inches, without what is below. area: left, bottom, width and height of the axes
    in it, in inches. titled: with a heading, and names of lines beside the axes. mark: the diameter
    of a mark in points. listed: at most so many points of the front. bars: at most so many points
    have all their bars. axis_title: inches. line: inches of a line of text below. letters: on such
    a line.
    """

    width: float
    height: float
    area: tuple[float, float, float, float]
    titled: bool
    mark: float
    listed: int
    bars: int
    axis_title: float
    line: float
    letters: int


SCREEN_LOOK = PanelLook(
    width=8.0,
    height=4.1,
    area=(0.72, 0.13, 6.48, 2.9),
    titled=True,
    mark=6.5,
    listed=12,
    bars=FEW,
    axis_title=0.55,
    line=0.18,
    letters=122,
)
COLUMN_LOOK = PanelLook(
    width=COLUMN,
    height=2.35,
    area=(0.45, 0.33, 2.6, 1.6),
    titled=False,
    mark=3.6,
    listed=8,
    bars=6,
    axis_title=0.0,
    line=0.125,
    letters=66,
)


def setting_names(groups: Sequence[Group]) -> list[str]:
    """What tells each setting from the others, with its number on the page: `setting 2, batch 4`;
    empty where headings tell them apart.
    """
    headings = {str(heading_lines(group)) for group in groups}
    if len(headings) == len(groups):
        return [""] * len(groups)
    return [
        ", ".join(filter(None, [f"setting {place}", words]))
        for place, words in enumerate(setting_words(groups), start=1)
    ]


def heading_lines(group: Group, setting_name: str = "") -> tuple[list[str], list[str]]:
    """The lines of a panel's title, and those that say below it what was measured."""
    setting = group.setting
    data = f"{short_name(setting.dataset)} ({setting.split})"
    title = f"{short_name(setting.target)} on {data}: {group.metric} against latency"
    drafter = f"drafter {short_name(setting.draft)}, " if setting.draft else ""
    examples = counted(setting.n_examples, "example")
    measured = f"{drafter}{examples}, {setting.dtype} on {setting.device}"
    capitalized = setting_name[:1].upper() + setting_name[1:]  # names keep their letters
    measured = ": ".join(filter(None, [capitalized, measured]))
    bars = f"speedup and difference in {group.metric}" if group.relative else group.metric
    subtitle = f"{measured}. Bars: 95 % intervals of {bars}."
    return (
        textwrap.wrap(title, _TITLE_LETTERS, break_on_hyphens=False),
        textwrap.wrap(subtitle, _SUBTITLE_LETTERS, break_on_hyphens=False),
    )


def inches_above(group: Group, look: PanelLook, setting_name: str) -> float:
    """Inches that a heading takes beyond one line for the title and one below it."""
    if not look.titled:
        return 0.0
    title, subtitle = heading_lines(group, setting_name)
    return look.line * (len(title) + len(subtitle) - 2)


def inches_below(group: Group, look: PanelLook, setting_name: str) -> float:
    """Inches below a panel: the axis' title, the legend, the list of the front and what a caption
    must say.
    """
    captions = caption_lines(group, look, setting_name)
    text_lines = len(front_list(group, look)) + len(captions)
    lines = 1.5 + 1.2 * _legend_rows(group, look) + text_lines
    return look.axis_title + look.line * lines


def _legend_rows(group: Group, look: PanelLook) -> int:
    """Rows of the legend, at most: an entry takes as much as its letters and the mark."""
    letters = max(len(policy) + 6 for policy in [*group.policies, "Pareto front"])
    entries_in_a_row = max(1, look.letters // letters)
    return math.ceil((len(group.policies) + 2) / entries_in_a_row)


def front_list(group: Group, look: PanelLook) -> list[str]:
    """The lines of each numbered point of the front: `1 bild (fallback 0.5): 1.62× [1.56, 1.68],
    BLEU 82.40, −6.88 …`.
    """
    front = front_in_words(group, bounds=look.titled)
    places = numbered_places(group, look)
    lines = []
    for place in places:
        result, label, numbers = front[place - 1]
        if group.is_off_axis(result):
            numbers += "; beyond the axis"
        lines += _list_entry(f"{place}  {label}", numbers, look.letters)
    if len(places) < len(front):
        lines.append(f"and {len(front) - len(places)} more on the front, in the report")
    return lines


def _list_entry(label: str, numbers: str, letters: int) -> list[str]:
    """A point's name and numbers on one line, or on two; what is too long for a line ends in an
    ellipsis.
    """
    if len(label) + len(numbers) + 2 <= letters:
        return [f"{label}: {numbers}"]
    return [shortened(f"{label}:", letters), shortened(f"     {numbers}", letters)]


def numbered_places(group: Group, look: PanelLook) -> list[int]:
    """The places in the front, from 1, of the points that have a number: evenly over the front,
    with both ends.
    """
    count = len(group.front)
    if count <= look.listed:
        return list(range(1, count + 1))
    gaps = look.listed - 1
    return [1 + round(index * (count - 1) / gaps) for index in range(look.listed)]


def beyond_lines(group: Group, look: PanelLook) -> list[str]:
    """Lines that name what is beyond the axis."""
    return textwrap.wrap(beyond_axis(group), look.letters - 8)


def caption_lines(group: Group, look: PanelLook, setting_name: str) -> list[str]:
    """Lines below a figure in a column: what was measured, and how far it can be relied on."""
    if look.titled:
        return []
    setting = group.setting
    machine = setting.hardware or setting.device
    restriction = " of some points" if len(group.results) > look.bars else ""
    facts = [
        setting_name,
        f"{setting_title(setting)}, {setting.dtype}, {machine}",
        model_sizes(group.results),
        f"bars: 95 % intervals{restriction}",
        caption(group.results),
    ]
    return textwrap.wrap("; ".join(filter(None, facts)) + ".", look.letters - 3)


def free_place(
    anchor: XY,
    label: Bbox,
    taken: Sequence[Bbox],
    lines: Sequence[MatplotlibPath],
    bounds: Bbox,
    radius: float,
) -> Bbox | None:
    """The nearest place for a label that covers no other box and stays inside the bounds, in
    pixels; None without one.

    The place is nearer to the label's own mark than to any other, avoids lines, and is not led to
    across another box, as far as that is possible. radius: from the middle of the mark to its edge.
    """
    best_box, fewest_faults = None, math.inf
    for distance, angle in product(_DISTANCES, _ANGLES):
        middle = _middle(anchor, label, distance + radius, math.radians(angle))
        box = _box_around(middle, label.width, label.height)
        if not _contains(bounds, box) or box.count_overlaps(taken):
            continue
        faults = _faults(anchor, middle, box, taken, lines)
        if not faults:
            return box
        if faults < fewest_faults:
            best_box, fewest_faults = box, faults
    return best_box


def _middle(anchor: XY, label: Bbox, distance: float, angle: float) -> XY:
    """The middle of a label whose nearest edge, not its middle, is so far from the anchor."""
    x = anchor[0] + math.cos(angle) * (distance + label.width / 2)
    y = anchor[1] + math.sin(angle) * (distance + label.height / 2)
    return x, y


def _box_around(middle: XY, width: float, height: float) -> Bbox:
    """A label's box with a pixel around it."""
    left, bottom = middle[0] - width / 2, middle[1] - height / 2
    return Bbox.from_bounds(left, bottom, width, height).padded(1)


def _contains(bounds: Bbox, box: Bbox) -> bool:
    across = bounds.x0 <= box.x0 and box.x1 <= bounds.x1
    return across and bounds.y0 <= box.y0 and box.y1 <= bounds.y1


def _faults(
    anchor: XY, middle: XY, box: Bbox, taken: Sequence[Bbox], lines: Sequence[MatplotlibPath]
) -> int:
    """How badly a label lies that covers nothing: worst beside another mark, then led across one,
    then on a line.
    """
    leader = MatplotlibPath([anchor, middle])
    reach = math.dist(anchor, middle)
    obstacles = [obstacle for obstacle in taken if not obstacle.contains(*anchor)]
    beside = any(math.dist(box_middle(obstacle), middle) < reach for obstacle in obstacles)
    across = any(leader.intersects_bbox(obstacle, filled=False) for obstacle in obstacles)
    on_line = any(line.intersects_bbox(box, filled=False) for line in lines)
    return 4 * beside + 2 * across + on_line


def box_middle(box: Bbox) -> XY:
    """The middle of a box."""
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
