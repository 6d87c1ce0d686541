"""The small pictures of the lab book, from numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from bild_lab.lab.results.groups import Group
from bild_lab.report.book.entry import HEIGHT, WIDTH, Dot, Line, Picture
from bild_lab.report.style import marks

EDGE = 7.0
MOST_DOTS = 120
_CURVE = "currentColor"

Scale = Callable[[float], float]
Place = tuple[float, float]


def plane(group: Group) -> Picture | None:
    """Quality against relative latency, with lines for the front and the baseline; None without both numbers."""
    drawn = [(one, at) for one in group.results if (at := group.position(one)) is not None]
    if not drawn or not all(math.isfinite(value) for _, at in drawn for value in (at.x, at.y)):
        return None
    across, up = group.limits()
    if group.wide:
        logarithm = scale(math.log(across[0]), math.log(across[1]), EDGE, WIDTH - EDGE)
        x: Scale = lambda value: logarithm(math.log(value))  # noqa: E731
    else:
        x = scale(*across, EDGE, WIDTH - EDGE)
    y = scale(*up, HEIGHT - EDGE, EDGE)
    front = group.front()
    places = [(x(at.x), y(at.y)) for one in front if (at := group.position(one)) is not None]
    lines = []
    if group.relative and group.baseline_quality is not None:
        level = y(group.baseline_quality)
        lines.append(Line("base", [(EDGE, level), (WIDTH - EDGE, level)]))
        lines.append(Line("base", [(x(1.0), EDGE), (x(1.0), HEIGHT - EDGE)]))
    if len(places) > 1:
        steps = [places[0]] + [corner for a, b in pairwise(places) for corner in ((b[0], a[1]), b)]
        lines.append(Line("front", steps))
    colours = marks(group.policies)
    dots = [
        Dot(x(at.x), y(at.y), colours[one.policy].colour, any(one is other for other in front))
        for one, at in drawn
        if not one.is_baseline
    ]
    dots = sorted(dots, key=lambda dot: dot.strong)[-MOST_DOTS:]  # the front is drawn last, and never left out
    cost = "relative latency" if group.relative else "latency"
    count = f"{len(drawn)} point{'' if len(drawn) == 1 else 's'}"
    return _rounded(Picture(f"{group.metric} against {cost}, {count}; faster is left, better is up", lines, dots))


def curve(label: str, values: Sequence[Place], marked: Sequence[Place] = ()) -> Picture | None:
    """A curve over steps, such as a loss, with marks on it; None for fewer than two finite values."""
    kept = [place for place in values if all(map(math.isfinite, place))]
    if len(kept) < 2:
        return None
    beside = [place for place in marked if all(map(math.isfinite, place))]
    x, y = _fitted([*kept, *beside])
    step = -(-len(kept) // MOST_DOTS)
    line = Line("curve", [(x(at), y(value)) for at, value in [*kept[:-1:step], kept[-1]]])
    return _rounded(Picture(label, [line], [Dot(x(at), y(value), _CURVE) for at, value in beside]))


def intervals(label: str, ratios: Sequence[tuple[float, float, float]]) -> Picture | None:
    """Ratios (low, value, high) as bars below each other, on a logarithmic axis with a line at 1; None without any."""
    kept = [each for each in ratios if all(value > 0 and math.isfinite(value) for value in each)][: int(HEIGHT / 4)]
    if not kept:
        return None
    reach = max(abs(math.log(value)) for each in kept for value in each) or 0.1
    x = scale(-reach, reach, EDGE, WIDTH - EDGE)
    rows = [EDGE + (index + 0.5) * (HEIGHT - 2 * EDGE) / len(kept) for index in range(len(kept))]
    lines = [Line("base", [(x(0.0), EDGE), (x(0.0), HEIGHT - EDGE)])]
    dots = []
    for (low, value, high), row in zip(kept, rows, strict=True):
        lines.append(Line("interval", [(x(math.log(low)), row), (x(math.log(high)), row)]))
        dots.append(Dot(x(math.log(value)), row, _CURVE, not low <= 1 <= high))
    return _rounded(Picture(label, lines, dots))


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """The linear map of low to start and of high to end."""
    width = (high - low) or 1.0
    return lambda value: start + (value - low) / width * (end - start)


def _fitted(places: Sequence[Place]) -> tuple[Scale, Scale]:
    xs, ys = zip(*places, strict=True)
    return scale(min(xs), max(xs), EDGE, WIDTH - EDGE), scale(min(ys), max(ys), HEIGHT - EDGE, EDGE)


def _rounded(picture: Picture) -> Picture:
    lines = [Line(one.role, [(round(x, 1), round(y, 1)) for x, y in one.corners]) for one in picture.lines]
    dots = [Dot(round(one.x, 1), round(one.y, 1), one.colour, one.strong) for one in picture.dots]
    return Picture(picture.label, lines, dots)
