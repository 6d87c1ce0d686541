"""Match rates of heads behind early layers, by layer and by position (PPD Tables 1, 4 to 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bild_lab.engine.ppd.pipeline import SHARED
from bild_lab.papers.match_rates import TOTAL, MatchRates
from bild_lab.report.figure_files import paper_figure
from bild_lab.report.style import HAIRLINE, MUTED, marks

FEW = 30  # tokens; positions with fewer are in the table, not in the figure


def draw_match_rates(found: MatchRates, path: Path, subtitle: str) -> None:
    """Left: the rate against the layer, a line with 95 % intervals for each k. Right: the rate against the position.

    The right panel shows the middle k, with a line for each layer; a group of positions is drawn at its first one.
    """
    middle = found.top_k[len(found.top_k) // 2]
    by_k: dict[tuple[str, str], list[tuple]] = defaultdict(list)  # points of x, rate, low and high
    by_layer: dict[tuple[str, str], list[tuple]] = defaultdict(list)
    for row in found.totals():
        by_k[row["heads"], f"k = {row['top_k']}"].append((row["layer"], row["rate"], row["low"], row["high"]))
    first = {found.label(group): group * found.positions + 1 for group in range(found.counts.shape[1])}
    for row in found.rows():
        if row.position != TOTAL and row.top_k == middle:
            place = first[row.position]
            if row.count >= FEW or place == 1:
                by_layer[row.heads, f"layer {row.layer}"].append((place, row.rate, row.rate, row.rate))
    with paper_figure(path, (10.0, 4.8), "Match rates of early layers", subtitle) as figure:
        left, right = (figure.add_axes((x, 0.12, 0.42, 0.68)) for x in (0.07, 0.55))
        _draw_lines(left, by_k, "layer", "all positions")
        _draw_lines(right, by_layer, "position", f"k = {middle}")
        left.set_ylabel("share of final tokens among the first k choices")
        left.set_xticks(found.layers)


def _draw_lines(axes: Axes, lines: Mapping[tuple[str, str], Sequence[tuple]], what: str, title: str) -> None:
    """A line for each kind of heads and each label, dashed and hollow for the model's own head."""
    axes.grid(color=HAIRLINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set(xlabel=what, ylim=(0, 1.02))
    axes.set_title(title, loc="left", fontsize=9)
    looks = marks(list(dict.fromkeys(label for _, label in lines)))
    names = list(dict.fromkeys(name for name, _ in lines))
    trained = (name for name in names if name != SHARED)
    dashes = {SHARED: (0, (4, 2)), **dict(zip(trained, cycle(("-", "-.", ":")), strict=False))}
    for (name, label), points in lines.items():
        x, rate, low, high = np.array(points).T
        mark = looks[label]
        filling = {"mfc": "white" if name == SHARED else mark.colour, "mec": mark.colour, "ms": 5}
        reach = np.clip([rate - low, high - rate], 0, None)  # rounding may put the rate just outside its interval
        style = {"color": mark.colour, "linestyle": dashes[name], "elinewidth": 1.0, "linewidth": 1.5}
        axes.errorbar(x, rate, reach, marker=mark.marker, **style, **filling)
    shown = [Line2D([], [], color=mark.colour, marker=mark.marker, ms=5, label=label) for label, mark in looks.items()]
    shown += [Line2D([], [], color=MUTED, linestyle=dashes[name], label=name) for name in names]
    axes.legend(handles=shown, loc="lower right", fontsize=7.5, frameon=False)
