"""Places point labels in a figure so that they overlap neither each other nor the points."""

import math
from collections.abc import Sequence

XY = tuple[float, float]  # x and y, or width and height, in pixels
Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels

_DISTANCES = (14, 24, 36, 52, 70, 92)
_ANGLES = (45, 135, 90, 315, 225, 270, 0, 180, 20, 160, 70, 110)
_SOFT_COST = 35.0


def place_labels(
    anchors: Sequence[XY], sizes: Sequence[XY], hard: Sequence[Box], soft: Sequence[Box], bounds: Box
) -> list[XY | None]:
    """Return for each anchor the center of its label, or None if no free space is near.

    Anchors get their labels in order. A label never covers a `hard` box or an earlier label, and never
    leaves `bounds`. It avoids `soft` boxes if there is free space not much farther away.
    """
    taken = list(hard)
    centers: list[XY | None] = []
    for anchor, size in zip(anchors, sizes, strict=True):
        center = _nearest_free(anchor, size, taken, soft, bounds)
        centers.append(center)
        if center is not None:
            taken.append(_box(center, size))
    return centers


def segment_boxes(start: XY, end: XY, step: float = 8.0) -> list[Box]:
    """Cover a straight line with small boxes, for use as obstacles."""
    count = max(1, round(math.dist(start, end) / step))
    points = [
        (start[0] + (end[0] - start[0]) * i / count, start[1] + (end[1] - start[1]) * i / count)
        for i in range(count + 1)
    ]
    return [(x - 1, y - 1, x + 1, y + 1) for x, y in points]


def _nearest_free(anchor: XY, size: XY, taken: list[Box], soft: Sequence[Box], bounds: Box) -> XY | None:
    best, best_cost = None, math.inf
    for distance in _DISTANCES:
        for angle in _ANGLES:
            center = _center(anchor, size, distance, math.radians(angle))
            box = _box(center, size)
            if not _inside(box, bounds) or any(_overlap(box, other) for other in taken):
                continue
            cost = distance + _SOFT_COST * sum(_overlap(box, other) for other in soft) ** 0.5
            if cost < best_cost:
                best, best_cost = center, cost
    return best


def _center(anchor: XY, size: XY, distance: float, angle: float) -> XY:
    """Push the label out until its nearest edge, not its center, is `distance` from the anchor."""
    right, up = math.cos(angle), math.sin(angle)
    return (anchor[0] + right * (distance + size[0] / 2), anchor[1] + up * (distance + size[1] / 2))


def _box(center: XY, size: XY) -> Box:
    pad = 3
    half_width, half_height = size[0] / 2 + pad, size[1] / 2 + pad
    return (center[0] - half_width, center[1] - half_height, center[0] + half_width, center[1] + half_height)


def _inside(box: Box, bounds: Box) -> bool:
    return box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
