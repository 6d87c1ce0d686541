"""Draws a paper's figure or table: curves, or rows of dots, with the paper's numbers as stars."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bild_lab.engine.speculative_theory import expected_tokens
from bild_lab.files import write_atomically
from bild_lab.lab.analysis.pareto import pareto_front
from bild_lab.lab.formatting import MINUS
from bild_lab.lab.schema.result import Result
from bild_lab.papers.cells import replaced, tokens_per_call
from bild_lab.papers.finished_points import RowOf, baseline_quality, curves
from bild_lab.papers.published import Published
from bild_lab.papers.speculative_curves import WINDOWS, draw_family, label_ends
from bild_lab.papers.speculative_curves import curves as family_of
from bild_lab.papers.verdicts import Comparison, Line
from bild_lab.report.style import FIGURE_STYLE, HAIRLINE, INK, MUTED, Mark, marks

_DPI = 150
SAME_QUALITY = 0.05  # texts of one model that differ by ties move its quality less
_PANEL = (4.6, 3.6)  # inches
_HEADING, _LEGEND = 0.75, 0.55
_LETTER = 0.06  # as wide as a letter of the subtitle
_ROW, _MOST_ROWS = 0.21, 100
_HERE = "#0072B2"
_STAR = {"marker": "*", "mfc": "#E69F00", "mec": INK, "mew": 0.7}
_FORMULA = {"marker": "D", "mfc": "white", "mec": INK, "mew": 1.1}


@dataclass(frozen=True)
class Picture:
    """What is drawn: a run compared with the paper.

    row: which curve a point belongs to. stands_for: the paper's panel that other panels are compared with, if any.
    """

    title: str
    subtitle: str
    points: Sequence[Result]
    row: RowOf
    comparison: Comparison
    published: Published
    stands_for: str | None = None


Drawing = Callable[[Picture, Path], None]


def draw_trade_offs(picture: Picture, path: Path) -> None:
    """Quality against latency relative to the baseline: a panel per data set, a curve per row (BiLD Figure 4).

    A line joins each curve's Pareto front. The paper's numbers are stars if it prints both speed and quality for the
    panel, and dotted lines if it prints only the speed.
    """

    def draw(axes: Axes, panel: str, own: dict[str, list[Result]], looks: dict[str, Mark]) -> None:
        for row, curve in own.items():
            known = [point for point in curve if point.speedup.value is not None and point.quality.value is not None]
            spots = [(1 / point.speedup.value, point.quality.value) for point in known]
            _curve(axes, spots, looks[row], pareto_front(spots))
            _stars(axes, picture, panel, row, looks[row])
        for quality, color in quality_lines(axes, own, looks):
            axes.plot(1.0, quality, "x", color=color, ms=8, mew=2.2, zorder=6)
        axes.set_xlabel("latency over the baseline's")

    _draw_panels(picture, path, draw)


def draw_engagement(picture: Picture, path: Path) -> None:
    """Quality against the share of tokens that the large model replaced (BiLD Figure 2)."""

    def draw(axes: Axes, panel: str, own: dict[str, list[Result]], looks: dict[str, Mark]) -> None:
        for row, curve in own.items():
            spots = sorted((100 * replaced(point), point.quality.value) for point in curve)
            _curve(axes, spots, looks[row], range(len(spots)))
        quality_lines(axes, own, looks)
        axes.set_xlabel("tokens that the large model replaced, %")

    _draw_panels(picture, path, draw)


def draw_dots(picture: Picture, path: Path) -> None:
    """A panel per quantity: every number is a dot in its row, with its interval, and the paper's number is a star."""
    quantities = picture.comparison.quantities
    sizes = [len(picture.comparison.of(quantity)) for quantity in quantities]
    if max(sizes) > _MOST_ROWS:
        return draw_scatter(picture, path)
    gaps = 0.75 * len(quantities)
    inches = (9.0, _HEADING + gaps + _ROW * sum(sizes) + _LEGEND)
    with page(path, inches, picture) as figure:
        top = inches[1] - _HEADING
        for quantity, size in zip(quantities, sizes, strict=True):
            height = _ROW * size
            area = (0.40, (top - 0.25 - height) / inches[1], 0.56, height / inches[1])
            _dots(figure.add_axes(area), quantity, picture.comparison.of(quantity))
            top -= height + 0.75
        here = Line2D([], [], ls="", marker="o", ms=6, color=_HERE, label="here")
        formula = Line2D([], [], ls="", ms=6, label="the paper's formula for this run", **_FORMULA)
        lines = [line for line in picture.comparison.lines if line.beside is not None]
        printed = any(line.cell.formula is None for line in lines)
        computed = any(line.cell.formula is not None for line in lines)
        _legend(figure, [here, *([_star_key()] if printed else []), *([formula] if computed else [])], 3)


def draw_scatter(picture: Picture, path: Path) -> None:
    """Each number against the paper's, for tables with too many rows for dots; on the line both are equal."""
    with page(path, (6.0, 6.0), picture) as figure:
        axes = figure.add_axes((0.12, 0.12, 0.82, 0.74))
        axes.grid(color=HAIRLINE, linewidth=0.7)
        pairs = [(line.beside, line.cell.value) for line in picture.comparison.lines if line.beside is not None]
        axes.plot(*zip(*pairs, strict=True), "o", ms=3.5, color=_HERE, alpha=0.6) if pairs else None
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1.0)
        axes.set(xlabel="paper", ylabel="here")


def draw_tokens_per_call(picture: Picture, path: Path) -> None:
    """Equation 1 as a curve per window, with the measured points (speculative decoding Figure 2)."""
    with page(path, (8.0, 5.0), picture) as figure:
        axes = figure.add_axes((0.08, 0.11, 0.8, 0.74))
        axes.grid(color=HAIRLINE, linewidth=0.7)
        axes.spines["top"].set_visible(False)
        axes.set(xlabel="acceptance rate α", ylabel="tokens per target call", xlim=(0, 1), ylim=(0, 12))
        family = family_of(expected_tokens, WINDOWS)
        draw_family(axes, family)
        label_ends(axes, {f"window {curve.parameter:g}": curve.values[-1] for curve in family})
        for point in picture.points:
            for cell in tokens_per_call([point]):
                axes.plot(point.counts.acceptance_rate, cell.value, "o", ms=6, mfc="#D55E00", mec="white", zorder=5)


@contextmanager
def page(path: Path, inches: tuple[float, float], picture: Picture) -> Iterator[Figure]:
    """A figure with its heading, written as PNG and PDF when the block ends."""
    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=inches, dpi=_DPI)
        FigureCanvasAgg(figure)
        left = 0.4 / inches[0]
        figure.text(left, 1 - 0.24 / inches[1], picture.title, va="center", size=11.5, weight="bold")
        subtitle = textwrap.fill(picture.subtitle, int((inches[0] - 0.6) / _LETTER))
        figure.text(left, 1 - 0.42 / inches[1], subtitle, va="top", size=8, color=MUTED)
        yield figure
        for kind, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
            image = io.BytesIO()
            figure.savefig(image, format=kind, metadata=metadata)
            write_atomically(path.with_suffix(f".{kind}"), image.getvalue())


def _draw_panels(picture: Picture, path: Path, draw: Callable[..., None]) -> None:
    """A panel per data set, two beside each other, with one legend below."""
    groups: dict[str, dict[str, list[Result]]] = {}
    for (panel, row), curve in curves(picture.points, picture.row).items():
        groups.setdefault(panel, {})[row] = curve
    looks = marks(list(dict.fromkeys(row for own in groups.values() for row in own)))
    columns = min(2, len(groups))
    lines = math.ceil(len(groups) / columns)
    width = max(7.0, _PANEL[0] * columns + 0.3)
    keys = _paper_keys(picture, groups)
    beside = legend_columns([*looks, *(key.get_label() for key in keys)], width)
    legend = _LEGEND + 0.2 * ((len(looks) + len(keys) - 1) // beside)
    inches = (width, _HEADING + _PANEL[1] * lines + legend)
    with page(path, inches, picture) as figure:
        for index, (panel, own) in enumerate(groups.items()):
            line, column = divmod(index, columns)
            bottom = inches[1] - _HEADING - _PANEL[1] * (line + 1)
            left, width = (0.65 + column * (inches[0] - 0.2) / columns), (inches[0] - 0.2) / columns - 0.95
            area = (left / inches[0], (bottom + 0.55) / inches[1], width / inches[0], (_PANEL[1] - 0.95) / inches[1])
            axes = figure.add_axes(area)
            axes.grid(color=HAIRLINE, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines["top"].set_visible(False)
            metric = next(iter(own.values()))[0].quality.metric
            axes.set_title(panel, loc="left", fontsize=9.5, color=INK)
            axes.set_ylabel(metric)
            draw(axes, panel, own, looks)
        handles = [
            Line2D([], [], marker=look.marker, color=look.colour, ms=6, lw=1.4, label=row)
            for row, look in looks.items()
        ]
        _legend(figure, [*handles, *keys], beside)


def _curve(axes: Axes, spots: Sequence[tuple[float, float]], look: Mark, joined: Sequence[int]) -> None:
    for index, (x, y) in enumerate(spots):
        fill = look.colour if index in joined else "white"
        axes.plot(x, y, look.marker, ms=5.5, mfc=fill, mec=look.colour, mew=1.1, zorder=4)
    line = [spots[index] for index in joined]
    if line:
        axes.plot(*zip(*line, strict=True), color=look.colour, linewidth=1.4, zorder=3)


def _stars(axes: Axes, picture: Picture, panel: str, row: str, look: Mark) -> None:
    printed = picture.published.printed
    for words in (" at minimal loss", " at one point of loss", ""):
        speed, quality = (printed.get((panel, row, f"{what}{words}")) for what in ("speedup", "quality"))
        if speed is not None and quality is not None:
            axes.plot(1 / speed, quality, "*", ms=13, mfc=look.colour, mec=INK, mew=0.8, zorder=7)
            continue
        if speed is None and picture.stands_for is not None:
            speed = printed.get((picture.stands_for, row, f"speedup{words}"))
        if speed is not None:
            axes.axvline(1 / speed, color=look.colour, linewidth=1.1, linestyle=(0, (1, 2)), zorder=1.5)


def quality_lines(axes: Axes, own: dict[str, list[Result]], looks: dict[str, Mark]) -> list[tuple[float, str]]:
    """Lines at the baseline's quality and one point below. Returns each baseline with the color of its mark.

    Where rows have models of their own, each has its baseline, in its color.
    """
    found = {row: quality for row, curve in own.items() if (quality := baseline_quality(curve)) is not None}
    apart = max(found.values(), default=0.0) - min(found.values(), default=0.0) > SAME_QUALITY
    baselines = [(found[row], looks[row].colour, f"baseline of {row}") for row in found]
    if not apart:
        baselines = [(quality, MUTED, "baseline") for quality, *_ in baselines[:1]]
    for quality, color, name in baselines:
        for level, text in ((quality, name), (quality - 1, "" if apart else f"{MINUS}1 point")):
            line = "-" if level == quality else (0, (5, 4))
            axes.axhline(level, color=color, linewidth=1.0, linestyle=line, zorder=1.5)
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "annotation_clip": False}
            axes.annotate(text, (1, level), (2, 3), ha="right", size=7.5, color=color, **place)
    return [(quality, color if apart else INK) for quality, color, _ in baselines]


def _dots(axes: Axes, quantity: str, lines: Sequence[Line]) -> None:
    axes.set_title(quantity, loc="left", fontsize=9.5, color=INK)
    axes.grid(axis="x", color=HAIRLINE, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "left"):
        axes.spines[side].set_visible(False)
    for height, line in enumerate(lines):
        cell = line.cell
        if cell.low is not None and cell.high is not None:
            axes.plot([cell.low, cell.high], [height, height], color=_HERE, linewidth=1.2, alpha=0.6)
        axes.plot(cell.value, height, "o", ms=6, color=_HERE, zorder=4)
        if line.beside is not None:
            look = {"ms": 10, **_STAR} if cell.formula is None else {"ms": 6, **_FORMULA}
            axes.plot(line.beside, height, zorder=5, **look)
    names = [f"{line.cell.panel} · {line.cell.row}" for line in lines]
    axes.set_yticks(range(len(lines)), names, size=7.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(lines) - 0.4, -0.6)


def _paper_keys(picture: Picture, panels: Iterable[str]) -> list[Line2D]:
    """The legend of the marks that `_stars` drew."""
    printed = {(panel, quantity.partition(" ")[0]) for panel, _, quantity in picture.published.printed}
    keys = []
    if any((panel, "speedup") in printed and (panel, "quality") in printed for panel in panels):
        keys.append(_star_key())
    lone = any((panel, "quality") not in printed and (panel, "speedup") in printed for panel in panels)
    if lone or (picture.stands_for, "speedup") in printed:
        keys.append(Line2D([], [], color=MUTED, linewidth=1.1, linestyle=(0, (1, 2)), label="the paper's speed"))
    return keys


def _star_key() -> Line2D:
    return Line2D([], [], ls="", ms=10, label="paper", **_STAR)


def _legend(figure: Figure, handles: list[Line2D], columns: int) -> None:
    look = {"frameon": False, "columnspacing": 1.5, "handletextpad": 0.5}
    figure.legend(
        handles=handles, ncols=min(len(handles), columns), loc="lower center", bbox_to_anchor=(0.5, 0.0), **look
    )


def legend_columns(labels: Sequence[str], width: float) -> int:
    """How many columns of a legend with these labels fit into so many inches, at most five."""
    widest = 0.6 + 0.085 * max(map(len, labels), default=1)
    return max(1, min(5, int(width / widest)))
