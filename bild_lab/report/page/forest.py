"""The plot of a comparison: an interval for every point, of its latency ratio and of its quality difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bild_lab.lab.analysis.paired import NOT_COMPARED, SAME, Compared
from bild_lab.lab.formatting import interval, number, signed, signed_interval
from bild_lab.lab.metrics import Difference
from bild_lab.lab.schema.numbers import Speedup

LABELS, PANEL, GAP = 330.0, 350.0, 34.0  # widths
TOP, ROW, BOTTOM = 30.0, 24.0, 34.0  # heights
Scale = Callable[[float], float]
Place = tuple[float, str, Speedup | Difference]  # of a point: its row, the verdict, the estimate
_LONGEST = 50  # characters of a label
_TICKS = 5


@dataclass(frozen=True)
class Interval:
    """A drawn interval. x: of its lower end, value and upper end. kind: "good", "bad" or "same" for B."""

    xs: tuple[float, float, float]
    y: float
    kind: str
    words: str


@dataclass(frozen=True)
class Panel:
    """One axis with its intervals. middle: where A and B are equal. ticks: x and text of each."""

    title: str
    left: float
    right: float
    middle: float
    ticks: Sequence[tuple[float, str]]
    intervals: Sequence[Interval]


@dataclass(frozen=True)
class Forest:
    """The whole plot. labels: y, text and full text of each row."""

    width: float
    height: float
    labels: Sequence[tuple[float, str, str]]
    panels: Sequence[Panel]


def forest(compared: Sequence[Compared], labels: Sequence[str]) -> Forest | None:
    """Return the plot, a row per point in the given order; None if neither latency nor quality was compared.

    labels: of the points.
    """
    rows = [TOP + (index + 0.5) * ROW for index in range(len(compared))]
    bottom = TOP + len(rows) * ROW
    latencies = [(row, one) for row, one in zip(rows, compared, strict=True) if one.latency is not None]
    qualities = [(row, one) for row, one in zip(rows, compared, strict=True) if one.quality is not None]
    panels = []
    if latencies:
        places = [(row, one.speed_verdict, one.latency) for row, one in latencies]
        told = [f"{number(each.value, 3)} {interval(each.low, each.high, 3)}" for _, _, each in places]
        panels.append(_panel("latency B/A: left of the line B is faster", 0, places, told, math.log, math.exp))
    if qualities:
        metric = qualities[0][1].pair.a.quality.metric
        places = [(row, one.quality_verdict, one.quality) for row, one in qualities]
        told = [f"{signed(each.value)} {signed_interval(each.low, each.high)}" for _, _, each in places]
        title = f"{metric}, B minus A: right of the line B is better"
        panels.append(_panel(title, len(panels), places, told, lambda value: value, lambda value: value))
    if not panels:
        return None
    shown = [label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…" for label in labels]
    return Forest(panels[-1].right + 14, bottom + BOTTOM, list(zip(rows, shown, labels, strict=True)), panels)


def _panel(title: str, index: int, places: Sequence[Place], told: Sequence[str], across: Scale, back: Scale) -> Panel:
    """across: from a value to the axis, where A and B are equal at 0. back: its inverse. told: each place in words."""
    ends = [across(value) for _, _, each in places for value in (each.low, each.value, each.high)]
    low, high = min(*ends, 0.0), max(*ends, 0.0)
    room = 0.06 * (high - low) or 0.05
    left = LABELS + index * (PANEL + GAP)
    width = (high - low) + 2 * room

    def x(value: float) -> float:
        return round(left + (value - low + room) / width * PANEL, 1)

    drawn = [
        Interval(tuple(x(across(value)) for value in (each.low, each.value, each.high)), row, _kind(verdict), words)
        for (row, verdict, each), words in zip(places, told, strict=True)
    ]
    ticks = [(x(across(value)), text) for value, text in _ticks(back(low - room), back(high + room), back(0.0))]
    return Panel(title, left, left + PANEL, x(0.0), ticks, drawn)


def _kind(verdict: str) -> str:
    if verdict in (SAME, NOT_COMPARED):
        return "same"
    return "good" if verdict in ("faster", "better") else "bad"


def _ticks(low: float, high: float, middle: float) -> list[tuple[float, str]]:
    """Round numbers between low and high, the point of equality among them."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in (1, 2, 5, 10) if one * power >= rough)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil((low - middle) / step), math.floor((high - middle) / step)
    values = [middle + count * step for count in range(first, last + 1)]
    written = number if middle else signed
    return [(value, written(value, digits)) for value in values if value > 0 or not middle]
