"""Figures 2 and 4 of the PPD paper (Yang et al., 2023): latency against compute, each with its values as CSV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bild_lab.engine.ppd.theory import compute_per_time_unit, compute_per_token, latency_per_token
from bild_lab.papers.ppd_simulator import draw_matches, simulate
from bild_lab.papers.ppd_table1 import DATASETS, LAYERS, TOP_KS, match_rate
from bild_lab.report.figure_files import paper_figure, write_csv
from bild_lab.report.style import HAIRLINE, INK, MUTED, marks

EXITS = (20, 30, 35, 37)  # the paper's figures show only the first, half of the layers
SIMULATED_TOKENS, SIMULATED_TEXTS = 128, 30
HEADS = {False: "shared", True: "trained"}

Compute = Callable[[int, int, float, int], float]


@dataclass(frozen=True)
class TradeOff:
    """A point: latency per token relative to the target alone, and compute; each by the theorem and simulated."""

    dataset: str
    trained: bool
    exit_layer: int
    top_k: int
    latency: float
    compute: float
    simulated_latency: float
    simulated_compute: float


def draw_compute_per_time_unit(path: Path) -> None:
    """Figure 2: how many processes run on average (Eqs. 2 and 4 at half the layers, Theorem 4.1 elsewhere)."""
    points = trade_offs(compute_per_time_unit, per_token=False)
    _draw(path, points, "Latency against compute per time unit", "processes that run on average")


def draw_compute_per_token(path: Path) -> None:
    """Figure 4: operations per token relative to the target alone (Eqs. 2 and 6 at half the layers)."""

    def relative(layers: int, exit_layer: int, rate: float, top_k: int) -> float:
        return compute_per_token(layers, exit_layer, rate, top_k) / layers

    points = trade_offs(relative, per_token=True)
    _draw(path, points, "Latency against compute per token", "times the compute of the target alone")


def trade_offs(compute: Compute, per_token: bool) -> list[TradeOff]:
    """Theory and simulation for every printed match rate at these exits.

    compute: the theorem's formula. per_token: whether the simulated compute is divided by the target's own compute;
    otherwise it is divided by the latency.
    """
    generator = np.random.default_rng(0)
    points = []
    for dataset in DATASETS:
        for trained in HEADS:
            for exit_layer in EXITS:
                for top_k in TOP_KS:
                    rate = match_rate(dataset, top_k, trained, exit_layer)
                    latency, work = simulated(exit_layer, top_k, rate, generator)
                    alone = LAYERS * SIMULATED_TOKENS
                    points.append(
                        TradeOff(
                            dataset,
                            trained,
                            exit_layer,
                            top_k,
                            latency_per_token(LAYERS, exit_layer, rate) / LAYERS,
                            compute(LAYERS, exit_layer, rate, top_k),
                            latency / alone,
                            work / (alone if per_token else latency),
                        )
                    )
    return points


def simulated(exit_layer: int, top_k: int, rate: float, generator: np.random.Generator) -> tuple[float, float]:
    """Mean latency and compute of texts drawn at this match rate, in layer-time units."""
    texts = [
        simulate(draw_matches(SIMULATED_TOKENS, rate, generator), LAYERS, exit_layer, top_k)
        for _ in range(SIMULATED_TEXTS)
    ]
    return float(np.mean([text.latency for text in texts])), float(np.mean([text.compute for text in texts]))


def _draw(path: Path, points: list[TradeOff], title: str, what: str) -> None:
    subtitle = (
        f"Match rates of Vicuna-13B (Table 1), exits after {', '.join(map(str, EXITS))} of {LAYERS} layers, "
        f"k = {', '.join(map(str, TOP_KS))} along each line. Crosses: simulated"
    )
    with paper_figure(path, (10.0, 4.6), title, subtitle) as figure:
        most = max(point.compute for point in points)
        for index, dataset in enumerate(DATASETS):
            axes = figure.add_axes((0.06 + 0.315 * index, 0.12, 0.285, 0.66))
            axes.grid(color=HAIRLINE, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.set(xlabel=what, xlim=(0.9, most + 0.2), ylim=(0.45, 1.02))
            axes.set_title(dataset, loc="left", fontsize=9, color=INK)
            if index:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel("latency over the target alone")
            draw_trade_offs(axes, [point for point in points if point.dataset == dataset])
        axes.legend(handles=_legend(), loc="lower right", fontsize=7.5, frameon=False, ncol=2)
    names = tuple(TradeOff.__dataclass_fields__)
    write_csv(path, names, [tuple(getattr(point, name) for name in names) for point in points])


def draw_trade_offs(axes: Axes, points: list[TradeOff]) -> None:
    """A line per exit and kind of heads, along growing k."""
    looks = marks([str(exit_layer) for exit_layer in EXITS])
    for exit_layer in EXITS:
        for trained in HEADS:
            line = [point for point in points if (point.exit_layer, point.trained) == (exit_layer, trained)]
            mark = looks[str(exit_layer)]
            style = {"color": mark.colour, "linestyle": "-" if trained else (0, (4, 2)), "linewidth": 1.5}
            filling = {"mfc": mark.colour if trained else "white", "mec": mark.colour, "ms": 5}
            heights = [point.latency for point in line]
            axes.plot([point.compute for point in line], heights, marker=mark.marker, **style, **filling)
            crosses = [point.simulated_latency for point in line]
            axes.plot([point.simulated_compute for point in line], crosses, "x", color=INK, ms=4, mew=0.9, zorder=5)


def _legend() -> list[Line2D]:
    looks = marks([str(exit_layer) for exit_layer in EXITS])
    exits = [
        Line2D([], [], color=look.colour, marker=look.marker, ms=5, label=f"layer {name}")
        for name, look in looks.items()
    ]
    trained = Line2D([], [], color=MUTED, label="trained heads")
    shared = Line2D([], [], color=MUTED, linestyle=(0, (4, 2)), label="shared head")
    return [*exits, trained, shared]
