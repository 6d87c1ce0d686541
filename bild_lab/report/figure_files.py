"""The two files of a paper's figure: the picture, and a CSV of the values that it shows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bild_lab.files import write_atomically
from bild_lab.report.style import FIGURE_STYLE, MUTED

_DPI = 150


@contextmanager
def paper_figure(path: Path, inches: tuple[float, float], title: str, subtitle: str) -> Iterator[Figure]:
    """A figure with its heading, written as a PNG when the block ends."""
    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=inches, dpi=_DPI)
        canvas = FigureCanvasAgg(figure)
        left = 0.48 / inches[0]
        figure.text(left, 1 - 0.24 / inches[1], title, va="center", size=11.5, weight="bold")
        figure.text(left, 1 - 0.48 / inches[1], subtitle, va="center", color=MUTED)
        yield figure
        image = io.BytesIO()
        canvas.print_png(image)
    write_atomically(path, image.getvalue())


def write_csv(figure: Path, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write the values that a figure shows to a CSV of the same name."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    write_atomically(figure.with_suffix(".csv"), text.getvalue().encode())
