"""The files of a paper's figure: the picture, and a CSV of the values that it shows."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bild_lab.files import write_atomically
from bild_lab.report.style import FIGURE_STYLE, HAIRLINE, INK, MUTED

_DPI = 150
_LETTER = 0.06  # inches, as wide as a letter of the subtitle


@contextmanager
def written_figure(path: Path, inches: tuple[float, float], kinds: Sequence[str] = ("png",)) -> Iterator[Figure]:
    """An empty figure, written when the block ends. kinds: of files, "png" and "pdf"."""
    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=inches, dpi=_DPI)
        FigureCanvasAgg(figure)
        yield figure
        for kind in kinds:
            image = io.BytesIO()
            figure.savefig(image, format=kind, metadata={"CreationDate": None} if kind == "pdf" else {})
            write_atomically(path.with_suffix(f".{kind}"), image.getvalue())


@contextmanager
def paper_figure(
    path: Path, inches: tuple[float, float], title: str, subtitle: str, kinds: Sequence[str] = ("png",)
) -> Iterator[Figure]:
    """A figure with its heading, written when the block ends."""
    with written_figure(path, inches, kinds) as figure:
        left = 0.45 / inches[0]
        figure.text(left, 1 - 0.24 / inches[1], title, va="center", size=11.5, weight="bold")
        lines = textwrap.fill(subtitle, int((inches[0] - 0.6) / _LETTER))
        figure.text(left, 1 - 0.42 / inches[1], lines, va="top", size=8, color=MUTED)
        yield figure


def add_panel(
    figure: Figure, area: tuple[float, float, float, float], title: str = "", grid: str = "both", **settings: Any
) -> Axes:
    """Axes on a part of the figure, with a grid behind what is drawn.

    area: left, bottom, width and height in shares of the figure. grid: along "x", "y" or "both". settings: of the axes,
    such as xlabel and ylim.
    """
    axes = figure.add_axes(area)
    axes.grid(axis=grid, color=HAIRLINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set(**settings)
    return axes


def write_csv(figure: Path, table: pd.DataFrame) -> None:
    """Write the values that a figure shows to a CSV of the same name."""
    write_atomically(figure.with_suffix(".csv"), table.to_csv(index=False).encode())
