"""Places for the numbers beside the marks of a figure, so that they cover neither marks nor each
other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from matplotlib.path import Path
from matplotlib.transforms import Bbox

XY = tuple[float, float]  # in pixels

_DISTANCES = (3, 6, 10, 15, 22, 30, 40, 52)  # pixels between a mark and its label
_ANGLES = (225, 315, 135, 45, 270, 90, 180, 0, 200, 340, 160, 20)  # degrees


def free_place(
    anchor: XY,
    label: Bbox,
    taken: Sequence[Bbox],
    lines: Sequence[Path],
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


def _faults(anchor: XY, middle: XY, box: Bbox, taken: Sequence[Bbox], lines: Sequence[Path]) -> int:
    """How badly a label lies that covers nothing: worst beside another mark, then led across one,
    then on a line.
    """
    leader = Path([anchor, middle])
    reach = math.dist(anchor, middle)
    obstacles = [obstacle for obstacle in taken if not obstacle.contains(*anchor)]
    beside = any(math.dist(box_middle(obstacle), middle) < reach for obstacle in obstacles)
    across = any(leader.intersects_bbox(obstacle, filled=False) for obstacle in obstacles)
    on_line = any(line.intersects_bbox(box, filled=False) for line in lines)
    return 4 * beside + 2 * across + on_line


def box_middle(box: Bbox) -> XY:
    """The middle of a box."""
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
