"""Figures 2, 3 and 4 of the speculative decoding paper (Leviathan et al., 2023), each with its values as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from bild_lab.engine.speculative_theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    oracle_improvement,
    walltime_improvement,
)
from bild_lab.errors import UserError
from bild_lab.lab.results.groups import by_setting, setting_title
from bild_lab.lab.schema.result import Result
from bild_lab.report.figure_files import add_panel, paper_figure, write_csv
from bild_lab.report.style import MUTED, Mark, marks

WINDOWS = (1, 3, 5, 7, 10)
COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
RATES = tuple(index / 200 for index in range(201))
RATES_OF_WINDOWS = RATES[:-10]  # up to 0.95: towards 1 the optimal window grows without bound
RULES = ("ExactMatch", "RejectionSampling", "SpeculativeSampling")  # of speculative decoding

_ALPHA = "acceptance rate α"
_SHADES = ("#7fb9de", "#003a5d")  # light and dark blue: the curves of a family have an order
_LINE_HEIGHT = 13  # points between the centers of two labels
_HEADING_INCHES, _PANEL_INCHES = 0.7, 4.2


@dataclass(frozen=True)
class Curve:
    """One line of a figure: the parameter it belongs to, and a value at each acceptance rate."""

    parameter: float
    rates: tuple[float, ...]
    values: tuple[float, ...]


class Measured(NamedTuple):
    """A measured point that Theorem 3.8 applies to. cost_ratio, predicted: None if no cost was recorded."""

    window: int
    acceptance_rate: float
    cost_ratio: float | None
    speedup: float
    low: float
    high: float
    predicted: float | None


def draw_expected_tokens(path: Path) -> None:
    """Figure 2: tokens per target call against the acceptance rate, a curve per window."""
    (bound,) = curves_of(lambda rate, _: oracle_improvement(rate, 0.0), [float("inf")], RATES[:-1])
    title, subtitle = "Expected tokens per target call", "Equation 1: (1 − α^(γ+1)) / (1 − α) for windows γ"
    with paper_figure(path, (8.0, 5.0), title, subtitle) as figure:
        axes, family = add_expected_tokens(figure)
        axes.plot(bound.rates, bound.values, color=MUTED, linewidth=1.2, linestyle=(0, (5, 3)))
        beside = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(0.87, 9, "any window: below 1 / (1 − α)", ha="right", va="center", bbox=beside)
    write_csv(path, ("window", "acceptance_rate", "expected_tokens"), rows_of([*family, bound]))


def add_expected_tokens(figure: Figure) -> tuple[Axes, list[Curve]]:
    """The panel and the curves of Equation 1."""
    family = curves_of(expected_tokens, WINDOWS)
    labels = {"xlabel": _ALPHA, "ylabel": "tokens per target call"}
    axes = add_panel(figure, (0.08, 0.11, 0.8, 0.74), xlim=(0, 1), ylim=(0, 12), **labels)
    draw_family(axes, family)
    label_ends(axes, ends_of(family, "window"))
    return axes, family


def draw_optimal_window(path: Path) -> None:
    """Figure 3: the window with the largest walltime improvement, a curve per cost ratio."""
    family = curves_of(optimal_window, COST_RATIOS, RATES_OF_WINDOWS)
    subtitle = "The largest walltime improvement (Theorem 3.8); c is a drafter step's time over a target step's"
    with paper_figure(path, (8.0, 5.0), "Optimal window", subtitle) as figure:
        limits = {"xlim": (0, RATES_OF_WINDOWS[-1]), "ylim": (0, 42)}
        labels = {"xlabel": _ALPHA, "ylabel": "tokens drafted per round"}
        axes = add_panel(figure, (0.08, 0.11, 0.8, 0.74), **labels, **limits)
        draw_family(axes, family, drawstyle="steps-post")
        label_ends(axes, ends_of(family, "c ="))
    write_csv(path, ("cost_ratio", "acceptance_rate", "optimal_window"), rows_of(family))


def draw_speed_and_operations(path: Path) -> None:
    """Figure 4: walltime improvement and growth of operations for a drafter that costs nothing (c = ĉ = 0).

    The panels mirror each other: a window's two curves begin at the same height in the middle.
    """
    faster = curves_of(lambda rate, window: walltime_improvement(rate, window, 0.0), WINDOWS)
    more = curves_of(lambda rate, window: operations_increase(rate, window, 0.0), WINDOWS)
    subtitle = "Theorems 3.8 (left) and 3.11 (right) for a drafter that costs nothing, c = ĉ = 0"
    with paper_figure(path, (10.0, 5.0), "Speed is paid for with operations", subtitle) as figure:
        left, right = (
            add_panel(figure, (start, 0.11, 0.385, 0.74), xlabel=_ALPHA, ylabel=what, xlim=(0, 1), ylim=(0, 12))
            for start, what in ((0.06, "times as fast as the target alone"), (0.555, "times the target's operations"))
        )
        draw_family(left, faster)
        label_ends(left, ends_of(faster, "window"))
        right.yaxis.set(label_position="right", ticks_position="right")
        right.spines["right"].set_visible(True)
        right.spines["left"].set_visible(False)
        draw_family(right, more)
    names = ("window", "acceptance_rate", "walltime_improvement", "operations_increase")
    operations = [value for curve in more for value in curve.values]
    write_csv(path, names, [(*row, value) for row, value in zip(rows_of(faster), operations, strict=True)])


def draw_measured(results: Sequence[Result], path: Path) -> None:
    """Measured speedups among the walltime curves, a panel per setting and policy with the median of its cost ratios.

    A panel without a cost ratio has the curves of c = 0. Raises UserError if no point drafted a
    fixed window and verified it by a rule of speculative decoding.
    """
    panels = measured_points(results)
    if not panels:
        raise UserError(
            f"measured points of speculative decoding are wanted, got none in {len(results)} finished points; "
            "run python run.py -m policy=speculative policy.window=1,3,5"
        )
    inches = _HEADING_INCHES + _PANEL_INCHES * len(panels)
    title = "Measured speedups among the curves of Theorem 3.8"
    subtitle = "Filled: measured, with 95 % intervals. Open: the theorem at the point's own α and c"
    with paper_figure(path, (8.0, inches), title, subtitle) as figure:
        for row, ((policy, setting), points) in enumerate(panels.items(), start=1):
            bottom = inches - _HEADING_INCHES - row * _PANEL_INCHES
            area = (0.08, (bottom + 0.5) / inches, 0.79, (_PANEL_INCHES - 1.15) / inches)
            axes = add_panel(figure, area, xlabel=_ALPHA, ylabel="times as fast as the target alone")
            note = draw_among_curves(axes, points)
            above = {"xycoords": "axes fraction", "textcoords": "offset points"}
            axes.annotate(f"{policy}, {note}", (0, 1), (0, 21), weight="bold", **above)
            axes.annotate(setting, (0, 1), (0, 8), color=MUTED, **above)
    rows = [(*panel, *point) for panel, points in panels.items() for point in points]
    write_csv(path, ("policy", "setting", *Measured._fields), rows)


def measured_points(results: Sequence[Result]) -> dict[tuple[str, str], list[Measured]]:
    """By policy and setting, the points that drafted a fixed window and verified it by one of RULES."""
    panels: dict[tuple[str, str], list[Measured]] = {}
    for group in by_setting(results):
        own = group.setting
        setting = f"{setting_title(own)}, temperature {own.temperature:g}, {own.dtype} on {own.device}"
        for policy in group.policies:
            points = [point for result in group.of_policy(policy) if (point := _measured(result)) is not None]
            panels |= {(policy, setting): points} if points else {}
    return panels


def _measured(result: Result) -> Measured | None:
    """The point, if the theorem applies to it. If a result has no prediction, the knob gives the window."""
    prediction, rate, speedup = result.prediction, result.counts.acceptance_rate, result.speedup
    window = result.knobs.get("window") if prediction is None else prediction.window
    if (result.facts or {}).get("acceptance") not in RULES or None in (window, rate, speedup.value):
        return None
    cost = None if prediction is None else prediction.cost_ratio
    predicted = None if cost is None else walltime_improvement(rate, window, cost)
    return Measured(window, rate, cost, speedup.value, speedup.low, speedup.high, predicted)


def draw_among_curves(axes: Axes, points: Sequence[Measured]) -> str:
    """A curve per measured window, in the colour of its points. Returns what the curves are for."""
    known = [point.cost_ratio for point in points if point.cost_ratio is not None]
    cost_ratio = median(known or [0.0])
    low, high = rates_around(points)
    axes.set_xlim(low, high)
    inside = tuple(low + index / 100 * (high - low) for index in range(101))
    windows = sorted({point.window for point in points})
    family = curves_of(lambda rate, window: walltime_improvement(rate, window, cost_ratio), windows, inside)
    looks = marks([f"window {window}" for window in windows])
    for curve, mark in zip(family, looks.values(), strict=True):
        axes.plot(curve.rates, curve.values, color=mark.colour, linewidth=1.4, alpha=0.6, zorder=3)
    for point in points:
        _draw_point(axes, point, looks[f"window {point.window}"])
    axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=(0, (5, 4)))
    label_ends(axes, ends_of(family, "window"), looks)
    return f"c = {cost_ratio:.3g}" if known else "no cost ratio recorded, curves for c = 0"


def rates_around(points: Sequence[Measured]) -> tuple[float, float]:
    """A range of acceptance rates that holds all points, at least 0.1 wide where [0, 1] allows it."""
    rates = [point.acceptance_rate for point in points]
    room = max(0.02, 0.05 - (max(rates) - min(rates)) / 2)
    return max(0.0, min(rates) - room), min(1.0, max(rates) + room)


def _draw_point(axes: Axes, point: Measured, mark: Mark) -> None:
    x, line = point.acceptance_rate, {"color": mark.colour, "zorder": 4}
    if point.predicted is not None:
        axes.plot([x, x], [point.speedup, point.predicted], linewidth=0.9, alpha=0.6, **line)
        hollow = {"mfc": "white", "mec": mark.colour, "mew": 1.2}
        axes.plot(x, point.predicted, mark.marker, ms=6, zorder=5, clip_on=False, **hollow)
    axes.plot([x, x], [point.low, point.high], linewidth=2.6, alpha=0.5, clip_on=False, **line)
    axes.plot(x, point.speedup, mark.marker, ms=6, color=mark.colour, zorder=6, clip_on=False)


def curves_of(
    value: Callable[[float, float], float], parameters: Iterable[float], rates: tuple[float, ...] = RATES
) -> list[Curve]:
    """The family of `value(acceptance_rate, parameter)`, a curve per parameter."""
    return [Curve(parameter, rates, tuple(value(rate, parameter) for rate in rates)) for parameter in parameters]


def draw_family(axes: Axes, family: Sequence[Curve], **style: object) -> None:
    """Draw curves in shades of one colour, from light to dark."""
    ends = list(zip(*map(to_rgb, _SHADES), strict=True))
    for index, curve in enumerate(family):
        share = index / (len(family) - 1)
        colour = to_hex([light + (dark - light) * share for light, dark in ends])
        axes.plot(curve.rates, curve.values, color=colour, linewidth=1.7, clip_on=False, zorder=3, **style)


def ends_of(family: Sequence[Curve], word: str) -> dict[str, float]:
    """Where each curve ends, by its name."""
    return {f"{word} {curve.parameter:g}": curve.values[-1] for curve in family}


def label_ends(axes: Axes, heights: dict[str, float], looks: dict[str, Mark] | None = None) -> None:
    """Write labels right of the axes, at their heights or as near as there is room, with their markers."""
    low, high = axes.set_ylim(axes.get_ylim())  # fix the limits, so that the markers below do not widen them
    gap = _LINE_HEIGHT / 72 * axes.figure.dpi / axes.get_window_extent().height * (high - low)
    ordered = sorted(heights, key=heights.__getitem__)
    for label, height in zip(ordered, spread([heights[label] for label in ordered], gap, high), strict=True):
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        axes.annotate(label, (1, height), (6 if looks is None else 20, 0), **place, annotation_clip=False)
        if looks is not None:
            mark, across = looks[label], axes.get_yaxis_transform()
            axes.plot(1.026, height, mark.marker, ms=5, color=mark.colour, transform=across, clip_on=False)


def spread(heights: Sequence[float], gap: float, highest: float) -> list[float]:
    """Move ascending heights until neighbours differ by `gap`: first upwards, then down below `highest`."""
    up = list(accumulate(heights, lambda below, height: max(height, below + gap)))
    down = accumulate([min(up[-1], highest), *up[-2::-1]], lambda above, height: min(height, above - gap))
    return list(down)[::-1]


def rows_of(family: Iterable[Curve]) -> list[tuple[float, float, float]]:
    """Parameter, acceptance rate and value of every point of every curve."""
    return [(c.parameter, rate, value) for c in family for rate, value in zip(c.rates, c.values, strict=True)]
