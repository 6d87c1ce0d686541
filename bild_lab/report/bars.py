"""Intervals as error bars: which points have one, and where a bar is cut because it leaves the axes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bild_lab.lab.results.groups import Group, Position
from bild_lab.lab.schema.result import Result

Limits = tuple[tuple[float, float], tuple[float, float]]  # of x and of y


@dataclass(frozen=True)
class Cut:
    """Where a bar leaves the axes. direction: left, right, down or up. end: the interval's own end, beyond the axis."""

    x: float
    y: float
    direction: str
    end: float


def with_bars(group: Group) -> list[Result]:
    """The results whose bars are drawn at first: all if they are few, else the front and the notable ones."""
    return [result for result in group.selected() if not result.is_baseline]


def cut_at(position: Position, limits: Limits) -> tuple[Position, list[Cut]]:
    """The position with bars that end inside the axes, and an arrow for each bar that was cut."""
    (left, right), (bottom, top) = limits
    x, y = position.x, position.y
    cuts = []
    if position.x_low < left:
        cuts.append(Cut(left, y, "left", position.x_low))
    if position.x_high > right:
        cuts.append(Cut(right, y, "right", position.x_high))
    if position.y_low < bottom:
        cuts.append(Cut(x, bottom, "down", position.y_low))
    if position.y_high > top:
        cuts.append(Cut(x, top, "up", position.y_high))
    inside = replace(
        position,
        x_low=max(position.x_low, left),
        x_high=min(position.x_high, right),
        y_low=max(position.y_low, bottom),
        y_high=min(position.y_high, top),
    )
    return inside, cuts
