"""Figures 2, 3 and 4 of the speculative decoding paper (Leviathan et al., 2023), each with its values as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bild_lab.engine.speculative_theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    oracle_improvement,
    walltime_improvement,
)
from bild_lab.report.figure_files import add_panel, paper_figure, write_csv
from bild_lab.report.style import MUTED

WINDOWS = (1, 3, 5, 7, 10)
COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
RATES = tuple(index / 200 for index in range(201))
RATES_OF_WINDOWS = RATES[:-10]  # up to 0.95: towards 1 the optimal window grows without bound

_ALPHA = "acceptance rate α"
_ONE_PANEL = (0.08, 0.11, 0.88, 0.74)


Family = dict[float, list[float]]  # by parameter, the values at each acceptance rate


def draw_expected_tokens(path: Path) -> None:
    """Figure 2: tokens per target call against the acceptance rate, a curve per window."""
    below_one = RATES[:-1]
    bound = curves_of(lambda rate, _: oracle_improvement(rate, 0.0), [float("inf")], below_one)
    title, subtitle = "Expected tokens per target call", "Equation 1: (1 − α^(γ+1)) / (1 − α) for windows γ"
    with paper_figure(path, (8.0, 5.0), title, subtitle) as figure:
        axes, family = add_expected_tokens(figure)
        axes.plot(below_one, *bound.values(), color=MUTED, linewidth=1.2, linestyle=(0, (5, 3)))
        beside = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(0.87, 9, "any window: below 1 / (1 − α)", ha="right", va="center", bbox=beside)
    rows = [*rows_of(family, RATES), *rows_of(bound, below_one)]
    write_csv(path, ("window", "acceptance_rate", "expected_tokens"), rows)


def add_expected_tokens(figure: Figure) -> tuple[Axes, Family]:
    """The panel and the curves of Equation 1."""
    family = curves_of(expected_tokens, WINDOWS)
    labels = {"xlabel": _ALPHA, "ylabel": "tokens per target call"}
    axes = add_panel(figure, _ONE_PANEL, xlim=(0, 1), ylim=(0, 12), **labels)
    draw_family(axes, family, RATES, "window")
    return axes, family


def draw_optimal_window(path: Path) -> None:
    """Figure 3: the window with the largest walltime improvement, a curve per cost ratio."""
    family = curves_of(optimal_window, COST_RATIOS, RATES_OF_WINDOWS)
    subtitle = "The largest walltime improvement (Theorem 3.8); c is a drafter step's time over a target step's"
    with paper_figure(path, (8.0, 5.0), "Optimal window", subtitle) as figure:
        limits = {"xlim": (0, RATES_OF_WINDOWS[-1]), "ylim": (0, 42)}
        axes = add_panel(figure, _ONE_PANEL, xlabel=_ALPHA, ylabel="tokens drafted per round", **limits)
        draw_family(axes, family, RATES_OF_WINDOWS, "c =", drawstyle="steps-post")
    write_csv(path, ("cost_ratio", "acceptance_rate", "optimal_window"), rows_of(family, RATES_OF_WINDOWS))


def draw_speed_and_operations(path: Path) -> None:
    """Figure 4: walltime improvement and growth of operations for a drafter that costs nothing (c = ĉ = 0)."""
    faster = curves_of(lambda rate, window: walltime_improvement(rate, window, 0.0), WINDOWS)
    more = curves_of(lambda rate, window: operations_increase(rate, window, 0.0), WINDOWS)
    subtitle = "Theorems 3.8 (left) and 3.11 (right) for a drafter that costs nothing, c = ĉ = 0"
    with paper_figure(path, (10.0, 5.0), "Speed is paid for with operations", subtitle) as figure:
        sides = ((0.06, faster, "times as fast as the target alone"), (0.555, more, "times the target's operations"))
        for start, family, what in sides:
            area, limits = (start, 0.11, 0.41, 0.74), {"xlim": (0, 1), "ylim": (0, 12)}
            draw_family(add_panel(figure, area, xlabel=_ALPHA, ylabel=what, **limits), family, RATES, "window")
    names = ("window", "acceptance_rate", "walltime_improvement", "operations_increase")
    write_csv(path, names, [(*one, other[-1]) for one, other in zip(rows_of(faster), rows_of(more), strict=True)])


def curves_of(
    value: Callable[[float, float], float], parameters: Iterable[float], rates: Sequence[float] = RATES
) -> Family:
    """`value(acceptance_rate, parameter)`, a curve per parameter."""
    return {parameter: [value(rate, parameter) for rate in rates] for parameter in parameters}


def draw_family(axes: Axes, family: Family, rates: Sequence[float], word: str, **style: object) -> None:
    """Draw curves in shades of blue, from light to dark, with a legend. word: what the parameter is."""
    shades = colormaps["Blues"](np.linspace(0.4, 1.0, len(family)))
    for (parameter, values), shade in zip(family.items(), shades, strict=True):
        look = {"color": shade, "linewidth": 1.7, "label": f"{word} {parameter:g}", **style}
        axes.plot(rates, values, clip_on=False, zorder=3, **look)
    axes.legend(loc="upper left", frameon=False)


def rows_of(family: Family, rates: Sequence[float] = RATES) -> list[tuple[float, float, float]]:
    """Parameter, acceptance rate and value of every point of every curve."""
    return [(parameter, *point) for parameter, values in family.items() for point in zip(rates, values, strict=True)]
