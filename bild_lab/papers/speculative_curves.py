"""Figures 2, 3 and 4 of the speculative decoding paper (Leviathan et al., 2023), each with its values as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb

from bild_lab.engine.speculative_theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    oracle_improvement,
    walltime_improvement,
)
from bild_lab.errors import UserError
from bild_lab.lab.results.groups import by_setting, setting_title
from bild_lab.lab.schema.numbers import Speedup
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.report.figure_files import paper_figure, write_csv
from bild_lab.report.style import HAIRLINE, MUTED, Mark, marks

WINDOWS = (1, 3, 5, 7, 10)
COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
RATES = tuple(index / 200 for index in range(201))
RATES_OF_WINDOWS = RATES[:-10]  # up to 0.95: towards 1 the optimal window grows without bound
RULES = ("ExactMatch", "RejectionSampling", "SpeculativeSampling")  # of speculative decoding

_SHADES = ("#7fb9de", "#003a5d")  # light and dark blue: the curves of a family have an order
_LINE_HEIGHT = 13  # points between the centers of two labels
_HEADING_INCHES, _PANEL_INCHES = 0.7, 4.2


@dataclass(frozen=True)
class Curve:
    """One line of a figure: the parameter it belongs to, and a value at each acceptance rate."""

    parameter: float
    rates: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """A measured point that Theorem 3.8 applies to.

    cost_ratio: None if it was not recorded.
    """

    window: int
    acceptance_rate: float
    cost_ratio: float | None
    speedup: Speedup

    @property
    def predicted(self) -> float | None:
        """The walltime improvement that the theorem gives; None without a cost ratio."""
        if self.cost_ratio is None:
            return None
        return walltime_improvement(self.acceptance_rate, self.window, self.cost_ratio)


@dataclass(frozen=True)
class Panel:
    """The points of one policy in one setting."""

    policy: str
    setting: str
    points: list[Measured]

    @property
    def cost_ratio(self) -> float | None:
        """The median of the points' cost ratios; None if none was recorded."""
        return median([p.cost_ratio for p in self.points if p.cost_ratio is not None] or [None])

    @property
    def rates(self) -> tuple[float, float]:
        """A range of acceptance rates that holds all points, at least 0.1 wide where [0, 1] allows it."""
        rates = [point.acceptance_rate for point in self.points]
        room = max(0.02, 0.05 - (max(rates) - min(rates)) / 2)
        return max(0.0, min(rates) - room), min(1.0, max(rates) + room)


def draw_expected_tokens(path: Path) -> None:
    """Figure 2: tokens per target call against the acceptance rate, a curve per window."""
    family = curves(expected_tokens, WINDOWS)
    (bound,) = curves(lambda rate, _: oracle_improvement(rate, 0.0), [float("inf")], RATES[:-1])
    title, subtitle = "Expected tokens per target call", "Equation 1: (1 − α^(γ+1)) / (1 − α) for windows γ"
    with paper_figure(path, (8.0, 5.0), title, subtitle) as figure:
        axes = figure.add_axes((0.08, 0.11, 0.8, 0.74))
        frame(axes, "tokens per target call", xlim=(0, 1), ylim=(0, 12))
        draw_family(axes, family)
        label_ends(axes, {f"window {curve.parameter:g}": curve.values[-1] for curve in family})
        axes.plot(bound.rates, bound.values, color=MUTED, linewidth=1.2, linestyle=(0, (5, 3)))
        beside = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(0.87, 9, "any window: below 1 / (1 − α)", ha="right", va="center", bbox=beside)
    write_csv(path, ("window", "acceptance_rate", "expected_tokens"), rows_of([*family, bound]))


def draw_optimal_window(path: Path) -> None:
    """Figure 3: the window with the largest walltime improvement, a curve per cost ratio."""
    family = curves(optimal_window, COST_RATIOS, RATES_OF_WINDOWS)
    subtitle = "The largest walltime improvement (Theorem 3.8); c is a drafter step's time over a target step's"
    with paper_figure(path, (8.0, 5.0), "Optimal window", subtitle) as figure:
        axes = figure.add_axes((0.08, 0.11, 0.8, 0.74))
        frame(axes, "tokens drafted per round", xlim=(0, RATES_OF_WINDOWS[-1]), ylim=(0, 42))
        draw_family(axes, family, drawstyle="steps-post")
        label_ends(axes, {f"c = {curve.parameter:g}": curve.values[-1] for curve in family})
    write_csv(path, ("cost_ratio", "acceptance_rate", "optimal_window"), rows_of(family))


def draw_speed_and_operations(path: Path) -> None:
    """Figure 4: walltime improvement and growth of operations for a drafter that costs nothing (c = ĉ = 0).

    The panels mirror each other: a window's two curves begin at the same height in the middle.
    """
    faster = curves(lambda rate, window: walltime_improvement(rate, window, 0.0), WINDOWS)
    more = curves(lambda rate, window: operations_increase(rate, window, 0.0), WINDOWS)
    subtitle = "Theorems 3.8 (left) and 3.11 (right) for a drafter that costs nothing, c = ĉ = 0"
    with paper_figure(path, (10.0, 5.0), "Speed is paid for with operations", subtitle) as figure:
        left, right = (figure.add_axes((start, 0.11, 0.385, 0.74)) for start in (0.06, 0.555))
        frame(left, "times as fast as the target alone", xlim=(0, 1), ylim=(0, 12))
        draw_family(left, faster)
        label_ends(left, {f"window {curve.parameter:g}": curve.values[-1] for curve in faster})
        frame(right, "times the operations of the target alone", xlim=(0, 1), ylim=(0, 12))
        right.yaxis.set(label_position="right", ticks_position="right")
        right.spines["right"].set_visible(True)
        right.spines["left"].set_visible(False)
        draw_family(right, more)
    names = ("window", "acceptance_rate", "walltime_improvement", "operations_increase")
    operations = [value for curve in more for value in curve.values]
    write_csv(path, names, [(*row, value) for row, value in zip(rows_of(faster), operations, strict=True)])


def draw_measured(results: Sequence[Result], path: Path) -> None:
    """Measured speedups among the walltime curves, a panel per setting and policy with its own cost ratio.

    A panel without a cost ratio has the curves of c = 0. Raises UserError if no point drafted a
    fixed window and verified it by a rule of speculative decoding.
    """
    panels = measured_panels(results)
    if not panels:
        raise UserError(
            f"measured points of speculative decoding are wanted, got none in {len(results)} finished points; "
            "run python run.py -m policy=speculative policy.window=1,3,5"
        )
    inches = _HEADING_INCHES + _PANEL_INCHES * len(panels)
    title = "Measured speedups among the curves of Theorem 3.8"
    subtitle = "Filled: measured, with 95 % intervals. Open: the theorem at the point's own α and c"
    with paper_figure(path, (8.0, inches), title, subtitle) as figure:
        for row, panel in enumerate(panels, start=1):
            bottom = inches - _HEADING_INCHES - row * _PANEL_INCHES
            area = (0.08, (bottom + 0.5) / inches, 0.79, (_PANEL_INCHES - 1.15) / inches)
            draw_panel(figure.add_axes(area), panel)
    names = "policy setting window acceptance_rate cost_ratio speedup low high predicted".split()
    write_csv(path, names, [row for panel in panels for row in measured_rows(panel)])


def measured_panels(results: Sequence[Result]) -> list[Panel]:
    """By setting and policy, the points that drafted a fixed window and verified it by one of RULES."""
    panels = []
    for group in by_setting(results):
        for policy in group.policies:
            found = [_measured(result) for result in group.of_policy(policy)]
            if points := [point for point in found if point is not None]:
                panels.append(Panel(policy, _described(group.setting), points))
    return panels


def measured_rows(panel: Panel) -> list[tuple]:
    """What a panel shows of each of its points."""
    rows = []
    for point in panel.points:
        drafted = (point.window, point.acceptance_rate, point.cost_ratio)
        speedup = (point.speedup.value, point.speedup.low, point.speedup.high)
        rows.append((panel.policy, panel.setting, *drafted, *speedup, point.predicted))
    return rows


def draw_panel(axes: Axes, panel: Panel) -> None:
    """A curve per measured window, in the colour of its points."""
    cost_ratio = 0.0 if panel.cost_ratio is None else panel.cost_ratio
    low, high = panel.rates
    inside = tuple(low + index / 100 * (high - low) for index in range(101))
    windows = sorted({point.window for point in panel.points})
    family = curves(lambda rate, window: walltime_improvement(rate, window, cost_ratio), windows, inside)
    looks = marks([f"window {window}" for window in windows])
    frame(axes, "times as fast as the target alone", xlim=(low, high))
    for curve, mark in zip(family, looks.values(), strict=True):
        axes.plot(curve.rates, curve.values, color=mark.colour, linewidth=1.4, alpha=0.6, zorder=3)
    for point in panel.points:
        _draw_point(axes, point, looks[f"window {point.window}"])
    axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=(0, (5, 4)))
    label_ends(axes, {name: curve.values[-1] for name, curve in zip(looks, family, strict=True)}, looks)
    note = f"c = {cost_ratio:.3g}" if panel.cost_ratio is not None else "no cost ratio recorded, curves for c = 0"
    above = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(f"{panel.policy}, {note}", (0, 1), (0, 21), weight="bold", **above)
    axes.annotate(panel.setting, (0, 1), (0, 8), color=MUTED, **above)


def curves(
    value: Callable[[float, float], float], parameters: Iterable[float], rates: tuple[float, ...] = RATES
) -> list[Curve]:
    """The family of `value(acceptance_rate, parameter)`, a curve per parameter."""
    return [Curve(parameter, rates, tuple(value(rate, parameter) for rate in rates)) for parameter in parameters]


def frame(axes: Axes, what: str, **limits: tuple[float, float]) -> None:
    """Axes of `what` against the acceptance rate."""
    axes.grid(color=HAIRLINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.set(xlabel="acceptance rate α", ylabel=what, **limits)


def draw_family(axes: Axes, family: Sequence[Curve], **style: object) -> None:
    """Draw curves in shades of one colour, from light to dark."""
    ends = list(zip(*map(to_rgb, _SHADES), strict=True))
    for index, curve in enumerate(family):
        share = index / (len(family) - 1)
        colour = to_hex([light + (dark - light) * share for light, dark in ends])
        axes.plot(curve.rates, curve.values, color=colour, linewidth=1.7, clip_on=False, zorder=3, **style)


def label_ends(axes: Axes, heights: dict[str, float], looks: dict[str, Mark] | None = None) -> None:
    """Write labels right of the axes, at their heights or as near as there is room, with their markers."""
    low, high = axes.set_ylim(axes.get_ylim())  # fix the limits, so that the markers below do not widen them
    gap = _LINE_HEIGHT / 72 * axes.figure.dpi / axes.get_window_extent().height * (high - low)
    ordered = sorted(heights, key=heights.__getitem__)
    for label, height in zip(ordered, apart([heights[label] for label in ordered], gap, high), strict=True):
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        axes.annotate(label, (1, height), (6 if looks is None else 20, 0), **place, annotation_clip=False)
        if looks is not None:
            mark, across = looks[label], axes.get_yaxis_transform()
            axes.plot(1.026, height, mark.marker, ms=5, color=mark.colour, transform=across, clip_on=False)


def apart(heights: Sequence[float], gap: float, highest: float) -> list[float]:
    """Move ascending heights until they are `gap` apart: first upwards, then down below `highest`."""
    up = list(accumulate(heights, lambda below, height: max(height, below + gap)))
    down = accumulate([min(up[-1], highest), *up[-2::-1]], lambda above, height: min(height, above - gap))
    return list(down)[::-1]


def rows_of(family: Iterable[Curve]) -> list[tuple[float, float, float]]:
    """Parameter, acceptance rate and value of every point of every curve."""
    return [(c.parameter, rate, value) for c in family for rate, value in zip(c.rates, c.values, strict=True)]


def _measured(result: Result) -> Measured | None:
    """The point, if the theorem applies to it."""
    return _drafted(result) if (result.facts or {}).get("acceptance") in RULES else None


def _drafted(result: Result) -> Measured | None:
    """The point, if it drafted a fixed window. If a result has no prediction, the knob gives the window."""
    prediction, rate, speedup = result.prediction, result.counts.acceptance_rate, result.speedup
    window = result.knobs.get("window") if prediction is None else prediction.window
    if None in (window, rate, speedup.value):
        return None
    return Measured(window, rate, None if prediction is None else prediction.cost_ratio, speedup)


def _described(setting: Setting) -> str:
    sampling = f"temperature {setting.temperature:g}"
    return f"{setting_title(setting)}, {sampling}, {setting.dtype} on {setting.device}"


def _draw_point(axes: Axes, point: Measured, mark: Mark) -> None:
    x, speedup, line = point.acceptance_rate, point.speedup, {"color": mark.colour, "zorder": 4}
    if point.predicted is not None:
        axes.plot([x, x], [speedup.value, point.predicted], linewidth=0.9, alpha=0.6, **line)
        hollow = {"mfc": "white", "mec": mark.colour, "mew": 1.2}
        axes.plot(x, point.predicted, mark.marker, ms=6, zorder=5, clip_on=False, **hollow)
    axes.plot([x, x], [speedup.low, speedup.high], linewidth=2.6, alpha=0.5, clip_on=False, **line)
    axes.plot(x, speedup.value, mark.marker, ms=6, color=mark.colour, zorder=6, clip_on=False)
