"""How figures look: colours and markers of policies, ticks, and matplotlib figures with their
files.

Okabe and Ito's colour-blind safe set, with orange darker and violet in place of sky blue: every
colour stands out from a white and from a dark page by 3 to 1.
"""

from __future__ import annotations

import io
import logging
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bild_lab.files import write_atomically
from bild_lab.lab.schema.formatting import counted, number, times
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import FEW, LOW, Group

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B97F00", "#9A6BE0")
MARKERS = (  # of matplotlib and of plotly
    ("o", "circle"),
    ("s", "square"),
    ("^", "triangle-up"),
    ("D", "diamond"),
    ("v", "triangle-down"),
    ("P", "cross"),
    ("p", "pentagon"),
    ("*", "star"),
    ("h", "hexagon"),
    ("<", "triangle-left"),
    (">", "triangle-right"),
)

INK = "#1c1e21"
MUTED = "#777c86"
HAIRLINE = "#e5e7eb"
STAGE_COLOURS = {"prefill": "#8A8A8A", "draft": "#2E93CC", "verify": "#0072B2", "host": "#B97F00"}

FIGURE_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "pdf.fonttype": 42,  # journals refuse the fonts of type 3 that matplotlib would embed
    "svg.hashsalt": "bild_lab",  # equal figures are equal files
}
COLUMN = 3.15  # inches: 8 cm, as wide as a column of a paper
VECTOR = ("pdf", "svg")
_SMALL = 6.5  # points, the letters of a figure in a column
_DPI = 150
_LETTER = 0.06  # inches, as wide as a letter of the subtitle
SUBTITLE_LINE = 0.14  # inches


@dataclass(frozen=True)
class Mark:
    """How one policy is drawn."""

    colour: str
    marker: str
    plotly_symbol: str


def marks(policies: list[str]) -> dict[str, Mark]:
    """Give each policy its colour and marker: no two of eleven have the same marker, no two of 66
    the same pair.
    """
    return {
        policy: Mark(COLOURS[index % len(COLOURS)], *MARKERS[index % len(MARKERS)])
        for index, policy in enumerate(policies)
    }


def with_bars(group: Group, limit: int = FEW) -> list[Result]:
    """The results whose intervals are drawn at first: all if they are few, else the front and the
    notable ones.
    """
    return [result for result in group.selected(limit) if not result.is_baseline]


def speedup_ticks(low: float, high: float, limit: int = 13) -> list[float]:
    """Return round speedups whose latencies, one over the speedup, lie between `low` and `high`, at
    most so many.
    """
    fastest, slowest = 1 / max(low, 0.01), 1 / high
    step = next(
        (step for step in (0.1, 0.25, 0.5, 1.0, 2.0, 5.0) if (fastest - slowest) / step <= 10), 10.0
    )
    spread = (high - low) / limit  # ticks that are closer would overlap
    ticks: list[float] = []
    for index in range(1, int(fastest / step) + 1):
        tick = round(index * step, 2)
        if tick >= slowest and (not ticks or 1 / ticks[-1] - 1 / tick >= spread):
            ticks.append(tick)
    return ticks


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times every power of ten between `low` and `high`."""
    series = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
    return [tick for tick in series if low <= tick <= high]


def speedups_on_axis(group: Group, limit: int = 13) -> list[float]:
    """Return the speedups that the upper axis names."""
    low, high = group.limits()[0]
    return log_ticks(1 / high, 1 / low) if group.needs_log_axis else speedup_ticks(low, high, limit)


def beyond_axis(group: Group) -> str:
    """The policies outside the axes: `beyond the axis: hf_generate 0.04×, bild (2 points below BLEU
    20.5)`.

    Of slow points each policy's fastest is named, of those of low quality their number.
    """
    low = Counter(result.policy for result in group.off_axis if group.is_low(result))
    slow = {
        result.policy: result.speedup.value
        for result in reversed(group.off_axis)
        if not group.is_low(result)
    }
    named = [f"{policy} {times(speedup)}" for policy, speedup in slow.items()]
    if low:
        bound = f"below {group.metric} {number(LOW * group.baseline_quality, 1)}"
        named += [f"{policy} ({counted(count, 'point')} {bound})" for policy, count in low.items()]
    return f"beyond the axis: {', '.join(named)}" if named else ""


def front_corners(group: Group) -> list[tuple[float, float]]:
    """Return the corners of the front; the baseline is the last one unless something faster is as
    good.
    """
    corners = [(at.x, at.y) for result in group.front if (at := group.position(result)) is not None]
    quality = group.baseline_quality
    if (
        group.relative
        and quality is not None
        and not any(x <= 1.0 and y >= quality - 1e-9 for x, y in corners)
    ):
        corners = sorted([*corners, (1.0, quality)])
    return corners


@contextmanager
def written_figure(
    path: Path, inches: tuple[float, float], kinds: Sequence[str] = ()
) -> Iterator[Figure]:
    """An empty figure, written when the block ends.

    In one that is as wide as a column of a paper letters are small. kinds: of files, "png", "pdf",
    "svg"; none: the kind of the path.
    """
    with rc_context(FIGURE_STYLE | ({"font.size": _SMALL} if inches[0] <= COLUMN else {})):
        figure = Figure(figsize=inches, dpi=_DPI)
        FigureCanvasAgg(figure)
        yield figure
        for kind in kinds or (path.suffix.removeprefix("."),):
            image, undated = io.BytesIO(), {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
            with quiet_fonts():
                figure.savefig(image, format=kind, metadata=undated.get(kind))
            write_atomically(path.with_suffix(f".{kind}"), image.getvalue())


@contextmanager
def quiet_fonts() -> Iterator[None]:
    """Keep the library that puts letters into a PDF from logging fifty lines for each, where a process
    shows information.
    """
    logger = logging.getLogger("fontTools")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def subtitle_lines(subtitle: str, width: float) -> list[str]:
    """The lines of the subtitle of a figure of a width in inches, each `SUBTITLE_LINE` high."""
    return textwrap.wrap(subtitle, int((width - 0.6) / _LETTER))


@contextmanager
def paper_figure(
    path: Path, inches: tuple[float, float], title: str, subtitle: str, kinds: Sequence[str] = ()
) -> Iterator[Figure]:
    """A figure with its heading, written when the block ends; in a column of a paper the caption is
    its heading. Matplotlib lays out its subplots, and legends outside of them, below the heading.
    """
    with written_figure(path, inches, kinds) as figure:
        figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
        if inches[0] > COLUMN:
            left, lines = 0.45 / inches[0], subtitle_lines(subtitle, inches[0])
            figure.text(left, 1 - 0.24 / inches[1], title, va="center", size=11.5, weight="bold")
            text = "\n".join(lines)
            figure.text(left, 1 - 0.42 / inches[1], text, va="top", size=8, color=MUTED)
            below = 1 - (0.48 + SUBTITLE_LINE * len(lines)) / inches[1]
            figure.get_layout_engine().set(rect=(0, 0, 1, below))
        yield figure


def as_panel(axes: Axes, title: str = "", grid: str = "both", **settings: Any) -> Axes:
    """The axes with a grid behind what is drawn. grid: along "x", "y" or "both". settings: of the
    axes, such as xlabel and ylim.
    """
    axes.grid(axis=grid, color=HAIRLINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.set_title(title, loc="left", fontsize="medium", color=INK)
    axes.set(**settings)
    return axes
