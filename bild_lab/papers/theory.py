"""What papers draw by equations alone, each figure with its values as CSV.

Figures 2 to 4 of speculative decoding (Leviathan et al., 2023), and Figures 2 and 4 of predictive
pipelined decoding (Yang et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bild_lab.engine.methods.ppd.theory import (
    compute_per_time_unit,
    compute_per_token,
    latency_per_token,
)
from bild_lab.engine.methods.speculative.theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    oracle_improvement,
    walltime_improvement,
)
from bild_lab.lab.store.table import write_csv
from bild_lab.papers.published import load_published
from bild_lab.report.style import MUTED, as_panel, marks, paper_figure

WINDOWS = (1, 3, 5, 7, 10)
COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
RATES = tuple(index / 200 for index in range(201))
RATES_OF_WINDOWS = RATES[:-10]  # up to 0.95: towards 1 the optimal window grows without bound
LAYERS = 40  # of Vicuna-13B
TABLE_1_LAYERS, TOP_KS = (10, 20, 30, 35, 37), (1, 3, 5)
# as published files name them
DATASETS = {"SQuAD": "squad", "WMT": "wmt15_en_fr", "CNN/DM": "cnn_dailymail_ppd"}
EXITS = (20, 30, 35, 37)  # the paper's figures show only the first, half of the layers
HEADS = {False: "shared", True: "trained"}
COMPUTES = {
    "compute_per_time_unit": "processes that run on average",
    "compute_per_token": "times the compute of the target alone",
}

_ALPHA = "acceptance rate α"


def curves(
    parameter: str,
    values: Iterable[float],
    rates: Sequence[float] = RATES,
    **formulas: Callable[[float, float], float],
) -> pd.DataFrame:
    """A row for each value of the parameter and each acceptance rate, with `formula(rate, value)`
    in its column.
    """
    rows = [
        {
            parameter: figure,
            "acceptance_rate": rate,
            **{name: formula(rate, figure) for name, formula in formulas.items()},
        }
        for figure in values
        for rate in rates
    ]
    return pd.DataFrame(rows)


def draw_curves(axes: Axes, table: pd.DataFrame, formula: str, word: str, **style: object) -> None:
    """Draw a curve per parameter in shades of blue, from light to dark, with a legend. word: before
    the parameter.
    """
    groups = table.groupby(table.columns[0])
    shades = colormaps["Blues"](np.linspace(0.4, 1.0, len(groups)))
    for (value, curve), shade in zip(groups, shades, strict=True):
        look = {"color": shade, "linewidth": 1.7, "label": f"{word} {value:g}", **style}
        axes.plot(curve["acceptance_rate"], curve[formula], clip_on=False, zorder=3, **look)
    axes.legend(loc="best", frameon=False)


def draw_expected_tokens(path: Path) -> None:
    """Figure 2: tokens per target call against the acceptance rate, a curve per window."""
    any_window = {"expected_tokens": lambda rate, _: oracle_improvement(rate, 0.0)}
    bound = curves("window", [float("inf")], RATES[:-1], **any_window)
    title = "Expected tokens per target call"
    subtitle = "Equation 1: (1 − α^(γ+1)) / (1 − α) for windows γ"
    with paper_figure(path, (8.0, 5.0), title, subtitle) as figure:
        axes, table = add_expected_tokens(figure)
        axes.plot(
            bound["acceptance_rate"],
            bound["expected_tokens"],
            color=MUTED,
            linewidth=1.2,
            linestyle=(0, (5, 3)),
        )
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(
            0.87, 9, "any window: below 1 / (1 − α)", ha="right", va="center", bbox=background
        )
    write_csv(path, pd.concat([table, bound]))


def add_expected_tokens(figure: Figure) -> tuple[Axes, pd.DataFrame]:
    """The panel and the curves of Equation 1."""
    table = curves("window", WINDOWS, expected_tokens=expected_tokens)
    labels = {"xlabel": _ALPHA, "ylabel": "tokens per target call"}
    axes = as_panel(figure.add_subplot(), xlim=(0, 1), ylim=(0, 12), **labels)
    draw_curves(axes, table, "expected_tokens", "window")
    return axes, table


def draw_optimal_window(path: Path) -> None:
    """Figure 3: the window with the largest walltime improvement, a curve per cost ratio."""
    table = curves("cost_ratio", COST_RATIOS, RATES_OF_WINDOWS, optimal_window=optimal_window)
    subtitle = (
        "The largest walltime improvement (Theorem 3.8); c is a drafter step's time over a target"
        " step's"
    )
    with paper_figure(path, (8.0, 5.0), "Optimal window", subtitle) as figure:
        limits = {"xlim": (0, RATES_OF_WINDOWS[-1]), "ylim": (0, 42)}
        axes = as_panel(
            figure.add_subplot(), xlabel=_ALPHA, ylabel="tokens drafted per round", **limits
        )
        draw_curves(axes, table, "optimal_window", "c =", drawstyle="steps-post")
    write_csv(path, table)


def draw_speed_and_operations(path: Path) -> None:
    """Figure 4: walltime improvement and growth of operations for a drafter that costs nothing (c =
    ĉ = 0).
    """
    formulas = {
        "walltime_improvement": walltime_improvement,
        "operations_increase": operations_increase,
    }
    free = {name: partial(formula, cost_ratio=0.0) for name, formula in formulas.items()}
    table = curves("window", WINDOWS, **free)
    subtitle = "Theorems 3.8 (left) and 3.11 (right) for a drafter that costs nothing, c = ĉ = 0"
    with paper_figure(path, (10.0, 5.0), "Speed is paid for with operations", subtitle) as figure:
        labels = ("times as fast as the target alone", "times the target's operations")
        limits = {"xlim": (0, 1), "ylim": (0, 12)}
        for axes, formula, what in zip(figure.subplots(1, 2), formulas, labels, strict=True):
            as_panel(axes, xlabel=_ALPHA, ylabel=what, **limits)
            draw_curves(axes, table, formula, "window")
    write_csv(path, table)


def match_rate(dataset: str, top_k: int, trained: bool, layer: int) -> float:
    """p̂ of the paper's Table 1, in [0, 1]."""
    printed = load_published("ppd_tab1").printed
    return printed[DATASETS[dataset], f"layer {layer}, {HEADS[trained]}, k = {top_k}", "match rate"]


def trade_offs() -> pd.DataFrame:
    """What the theorem gives for every printed match rate at these exits, a row each.

    latency, compute_per_token: of a token, relative to the target alone. compute_per_time_unit:
    processes that run on average.
    """
    rows = []
    for dataset, trained, exit_layer, top_k in product(DATASETS, HEADS, EXITS, TOP_KS):
        rate = match_rate(dataset, top_k, trained, exit_layer)
        rows.append(
            {
                "dataset": dataset,
                "trained": trained,
                "exit_layer": exit_layer,
                "top_k": top_k,
                "latency": latency_per_token(LAYERS, exit_layer, rate) / LAYERS,
                "compute_per_time_unit": compute_per_time_unit(LAYERS, exit_layer, rate, top_k),
                "compute_per_token": compute_per_token(LAYERS, exit_layer, rate, top_k) / LAYERS,
            }
        )
    return pd.DataFrame(rows)


def draw_trade_offs(path: Path, compute: str) -> None:
    """Latency against compute_per_time_unit (Figure 2: Eqs. 2 and 4 at half the layers, Theorem 4.1
    elsewhere), or against compute_per_token (Figure 4: Eqs. 2 and 6 at half the layers).
    """
    what = COMPUTES[compute]
    subtitle = (
        f"Match rates of Vicuna-13B (Table 1), exits after {', '.join(map(str, EXITS))} of {LAYERS}"
        f" layers, k = {', '.join(map(str, TOP_KS))} along each line"
    )
    points, looks = trade_offs(), marks([str(exit_layer) for exit_layer in EXITS])
    with paper_figure(
        path, (10.0, 4.6), f"Latency against {compute.replace('_', ' ')}", subtitle
    ) as figure:
        limits = {"xlim": (0.9, points[compute].max() + 0.2), "ylim": (0.45, 1.02)}
        subplots = figure.subplots(1, len(DATASETS), sharey=True)
        subplots[0].set_ylabel("latency over the target alone")
        panels = points.groupby("dataset", sort=False)
        for axes, (dataset, panel) in zip(subplots, panels, strict=True):
            as_panel(axes, dataset, xlabel=what, **limits)
            for (exit_layer, trained), line in panel.groupby(["exit_layer", "trained"]):
                mark = looks[str(exit_layer)]
                style = {
                    "color": mark.colour,
                    "linestyle": "-" if trained else (0, (4, 2)),
                    "linewidth": 1.5,
                }
                filling = {"mfc": mark.colour if trained else "white", "mec": mark.colour, "ms": 5}
                name = f"layer {exit_layer}" if trained else None
                axes.plot(
                    line[compute],
                    line["latency"],
                    marker=mark.marker,
                    label=name,
                    **style,
                    **filling,
                )
        axes.legend(loc="lower right", fontsize=7.5, frameon=False, title="dashed: shared head")
    write_csv(path, points)
