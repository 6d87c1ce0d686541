"""Predictive pipelined decoding (Yang et al., 2023): the pipeline simulated on a clock, and Figures 2 and 4 with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from bild_lab.engine.ppd.theory import compute_per_time_unit, compute_per_token, latency_per_token, require_exit
from bild_lab.errors import require_whole
from bild_lab.papers.published import Key, load_published
from bild_lab.report.figure_files import add_panel, paper_figure, write_csv
from bild_lab.report.style import INK, marks

MAIN = 0  # the process that finishes every token; the candidates' are 1 to k

LAYERS = 40  # of Vicuna-13B
TABLE_1_LAYERS, TOP_KS = (10, 20, 30, 35, 37), (1, 3, 5)
DATASETS = {"SQuAD": "squad", "WMT": "wmt15_en_fr", "CNN/DM": "cnn_dailymail_ppd"}  # as published files name them
EXITS = (20, 30, 35, 37)  # the paper's figures show only the first, half of the layers
SIMULATED_TOKENS, SIMULATED_TEXTS = 128, 30
HEADS = {False: "shared", True: "trained"}


class Busy(NamedTuple):
    """A process runs layers for a token: from `start` to `end` on the clock, one layer per unit.

    token: its index in the text, from 0; for a candidate, the index of the token that it would follow.
    """

    process: int
    token: int
    start: int
    end: int


@dataclass(frozen=True)
class Simulated:
    """One text: when which process was busy."""

    busy: tuple[Busy, ...]

    @property
    def latency(self) -> int:
        """Units until the last token is finished."""
        return max(each.end for each in self.busy if each.process == MAIN)

    @property
    def compute(self) -> int:
        """Units of all processes together."""
        return sum(each.end - each.start for each in self.busy)


def simulate(matches: Sequence[bool], layers: int, exit_layer: int, top_k: int) -> Simulated:
    """Simulate Algorithm 1 in layer-time units, on a text with one token more than `matches` has values.

    matches: for each token but the last, whether one of the candidates predicted from it was its
    successor; drawn (`draw_matches`) or from data. Raises UserError for values out of range.
    """
    require_exit(layers, exit_layer)
    require_whole("top_k", top_k, 1)
    ahead = layers - exit_layer  # layers that a candidate runs while the current token finishes
    clock, done = 0, 0  # done: layers of the current token that its candidate process has run
    busy: list[Busy] = []
    for token, matched in enumerate([*matches, False]):
        exit_time = clock + exit_layer - done
        end = exit_time + ahead
        busy.append(Busy(MAIN, token, clock, end))
        busy += [Busy(process, token, exit_time, end) for process in range(1, top_k + 1)]
        clock, done = end, ahead if matched else 0
    return Simulated(tuple(busy))


def draw_matches(tokens: int, match_rate: float, generator: np.random.Generator) -> list[bool]:
    """Draw independent matches for a text of `tokens` tokens, as the theorem assumes."""
    return (generator.random(tokens - 1) < match_rate).tolist()


def match_rate(dataset: str, top_k: int, trained: bool, layer: int) -> float:
    """p̂ of the paper's Table 1, in [0, 1]."""
    return _table_1()[DATASETS[dataset], f"layer {layer}, {HEADS[trained]}, k = {top_k}", "match rate"]


@cache
def _table_1() -> dict[Key, float]:
    return load_published("ppd_tab1").printed


@dataclass(frozen=True)
class TradeOff:
    """A point: latency per token relative to the target alone, and compute; each by the theorem and simulated.

    compute_per_time_unit: processes that run on average. compute_per_token: relative to the target alone.
    """

    dataset: str
    trained: bool
    exit_layer: int
    top_k: int
    latency: float
    simulated_latency: float
    compute_per_time_unit: float
    simulated_compute_per_time_unit: float
    compute_per_token: float
    simulated_compute_per_token: float


def draw_compute_per_time_unit(path: Path) -> None:
    """Figure 2: how many processes run on average (Eqs. 2 and 4 at half the layers, Theorem 4.1 elsewhere)."""
    _draw(path, "compute_per_time_unit", "processes that run on average")


def draw_compute_per_token(path: Path) -> None:
    """Figure 4: operations per token relative to the target alone (Eqs. 2 and 6 at half the layers)."""
    _draw(path, "compute_per_token", "times the compute of the target alone")


def trade_offs() -> list[TradeOff]:
    """Theory and simulation for every printed match rate at these exits."""
    generator = np.random.default_rng(0)
    points = []
    for kind in product(DATASETS, HEADS, EXITS, TOP_KS):
        dataset, trained, exit_layer, top_k = kind
        rate, alone = match_rate(dataset, top_k, trained, exit_layer), LAYERS * SIMULATED_TOKENS
        latency, work = simulated(exit_layer, top_k, rate, generator)
        per_unit = (compute_per_time_unit(LAYERS, exit_layer, rate, top_k), work / latency)
        per_token = (compute_per_token(LAYERS, exit_layer, rate, top_k) / LAYERS, work / alone)
        expected = latency_per_token(LAYERS, exit_layer, rate) / LAYERS
        points.append(TradeOff(*kind, expected, latency / alone, *per_unit, *per_token))
    return points


def simulated(exit_layer: int, top_k: int, rate: float, generator: np.random.Generator) -> tuple[float, float]:
    """Mean latency and compute of texts drawn at this match rate, in layer-time units."""
    texts = [
        simulate(draw_matches(SIMULATED_TOKENS, rate, generator), LAYERS, exit_layer, top_k)
        for _ in range(SIMULATED_TEXTS)
    ]
    return float(np.mean([text.latency for text in texts])), float(np.mean([text.compute for text in texts]))


def _draw(path: Path, compute: str, what: str) -> None:
    subtitle = (
        f"Match rates of Vicuna-13B (Table 1), exits after {', '.join(map(str, EXITS))} of {LAYERS} layers, "
        f"k = {', '.join(map(str, TOP_KS))} along each line. Crosses: simulated"
    )
    points = trade_offs()
    with paper_figure(path, (10.0, 4.6), f"Latency against {compute.replace('_', ' ')}", subtitle) as figure:
        limits = {"xlim": (0.9, max(getattr(point, compute) for point in points) + 0.2), "ylim": (0.45, 1.02)}
        for index, dataset in enumerate(DATASETS):
            axes = add_panel(figure, (0.06 + 0.315 * index, 0.12, 0.285, 0.66), dataset, xlabel=what, **limits)
            axes.tick_params(labelleft=not index)
            axes.set_ylabel("" if index else "latency over the target alone")
            _draw_panel(axes, [point for point in points if point.dataset == dataset], compute)
        axes.legend(loc="lower right", fontsize=7.5, frameon=False, title="dashed: shared head")
    write_csv(path, [field.name for field in fields(TradeOff)], map(astuple, points))


def _draw_panel(axes: Axes, points: list[TradeOff], compute: str) -> None:
    """A line for each exit and kind of heads."""
    looks = marks([str(exit_layer) for exit_layer in EXITS])
    for exit_layer, trained in product(EXITS, HEADS):
        line = [point for point in points if (point.exit_layer, point.trained) == (exit_layer, trained)]
        mark = looks[str(exit_layer)]
        style = {"color": mark.colour, "linestyle": "-" if trained else (0, (4, 2)), "linewidth": 1.5}
        filling = {"mfc": mark.colour if trained else "white", "mec": mark.colour, "ms": 5}
        expected = [(getattr(point, compute), point.latency) for point in line]
        crosses = [(getattr(point, f"simulated_{compute}"), point.simulated_latency) for point in line]
        name = f"layer {exit_layer}" if trained else None
        axes.plot(*zip(*expected, strict=True), marker=mark.marker, label=name, **style, **filling)
        axes.plot(*zip(*crosses, strict=True), "x", color=INK, ms=4, mew=0.9, zorder=5)
