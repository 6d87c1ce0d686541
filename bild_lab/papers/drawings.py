"""Draws a paper's figure or table: curves, rows of dots with the paper's numbers as stars, or texts
of two models.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bild_lab.lab.schema.examples import MeasuredExample, read_examples
from bild_lab.lab.schema.formatting import MINUS
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import pareto_front
from bild_lab.papers.cells import RowOf, baseline_quality, curves, replaced, tokens_per_call
from bild_lab.papers.published import ComparedNumber, Comparison, Published
from bild_lab.papers.theory import add_expected_tokens
from bild_lab.report.style import (
    COLUMN,
    HAIRLINE,
    INK,
    MUTED,
    Mark,
    as_panel,
    marks,
    paper_figure,
)

SAME_QUALITY = 0.05  # texts of one model that differ by ties move its quality less
_PANEL = (4.6, 3.6)  # inches
_HEADING, _LEGEND = 0.75, 0.55  # inches
_ROW, _MOST_ROWS = 0.21, 100
_HERE = "#0072B2"
_STAR = {"marker": "*", "mfc": "#E69F00", "mec": INK, "mew": 0.7}
_FORMULA = {"marker": "D", "mfc": "white", "mec": INK, "mew": 1.1}
_DOTTED, _DASHED = (0, (1, 2)), (0, (5, 4))
_TARGET = "#D55E00"  # of the target's tokens
# texts that are shown, characters of a line, inches of a line
_TEXTS, _WIDTH, _TEXT_LINE = 4, 96, 0.19


@dataclass(frozen=True)
class Picture:
    """What is drawn: a run compared with the paper.

    row: which curve a point belongs to. stands_for: the paper's panel that other panels are
    compared with, if any.
    column: whether it is as wide as a column of a paper, without a heading.
    """

    title: str
    subtitle: str
    points: Sequence[Result]
    row: RowOf
    comparison: Comparison
    published: Published
    stands_for: str | None = None
    column: bool = False

    @property
    def heading(self) -> float:
        """Inches of the heading."""
        return 0.05 if self.column else _HEADING

    @property
    def legend(self) -> float:
        """Inches of the first row of the legend, and of the room above it."""
        return 0.2 if self.column else _LEGEND

    @property
    def beside(self) -> int:
        """Entries of a legend beside one another."""
        return 2 if self.column else 3


Drawing = Callable[[Picture, Path], None]


def draw_trade_offs(picture: Picture, path: Path) -> None:
    """Quality against latency relative to the baseline: a panel per data set, a curve per row (BiLD
    Figure 4).

    A line joins each curve's Pareto front. The paper's numbers are stars if it prints both speed
    and quality for the panel, this by the metric of the axis, and else dotted lines at the speed.
    """

    def draw(
        axes: Axes, panel: str, curves_of_panel: dict[str, list[Result]], looks: dict[str, Mark]
    ) -> None:
        for row, curve in curves_of_panel.items():
            known = [
                point
                for point in curve
                if point.speedup.value is not None and point.quality.value is not None
            ]
            spots = [(1 / point.speedup.value, point.quality.value) for point in known]
            _curve(axes, spots, looks[row], pareto_front(spots))
            _stars(axes, picture, panel, row, looks[row], _metric(curves_of_panel))
        for quality, color in quality_lines(axes, curves_of_panel, looks):
            axes.plot(1.0, quality, "x", color=color, ms=8, mew=2.2, zorder=6)
        axes.set_xlabel("latency over the baseline's")

    _draw_panels(picture, path, draw)


def draw_engagement(picture: Picture, path: Path) -> None:
    """Quality against the share of tokens that the large model replaced (BiLD Figure 2)."""

    def draw(
        axes: Axes, panel: str, curves_of_panel: dict[str, list[Result]], looks: dict[str, Mark]
    ) -> None:
        for row, curve in curves_of_panel.items():
            spots = sorted((100 * replaced(point), point.quality.value) for point in curve)
            _curve(axes, spots, looks[row], range(len(spots)))
        quality_lines(axes, curves_of_panel, looks)
        axes.set_xlabel("tokens that the large model replaced, %")

    _draw_panels(picture, path, draw)


def draw_dots(picture: Picture, path: Path) -> None:
    """A panel per quantity: every number is a dot in its row, with its interval, and the paper's
    number is a star.
    """
    panels: dict[str, list[ComparedNumber]] = {}
    for line in picture.comparison.lines:
        panels.setdefault(line.cell.quantity, []).append(line)
    if max(map(len, panels.values())) > _MOST_ROWS:
        return draw_scatter(picture, path)
    heights = [_ROW * len(lines) for lines in panels.values()]
    inches = (
        COLUMN if picture.column else 9.0,
        picture.heading + sum(heights) + 0.75 * len(panels) + picture.legend,
    )
    with _page(path, inches, picture) as figure:
        subplots = figure.subplots(len(panels), squeeze=False, height_ratios=heights).flat
        for axes, (quantity, lines) in zip(subplots, panels.items(), strict=True):
            _dots(as_panel(axes, quantity, "x"), lines, 38 if picture.column else 90)
        keys = [Line2D([], [], ls="", marker="o", ms=6, color=_HERE, label="here")]
        compared = [
            line.cell.formula for line in picture.comparison.lines if line.reference is not None
        ]
        if None in compared:
            keys.append(_star_key())
        if any(formula is not None for formula in compared):
            keys.append(
                Line2D([], [], ls="", ms=6, label="the paper's formula for this run", **_FORMULA)
            )
        _legend(figure, keys, picture.beside)


def draw_scatter(picture: Picture, path: Path) -> None:
    """Each number against the paper's, for tables with too many rows for dots; on the line both are
    equal.
    """
    with _page(path, (COLUMN, COLUMN) if picture.column else (6.0, 6.0), picture) as figure:
        axes = as_panel(figure.add_subplot(), xlabel="paper", ylabel="here")
        pairs = [
            (line.reference, line.cell.value)
            for line in picture.comparison.lines
            if line.reference is not None
        ]
        axes.plot(*zip(*pairs, strict=True), "o", ms=3.5, color=_HERE, alpha=0.6) if pairs else None
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1.0)


def draw_tokens_per_call(picture: Picture, path: Path) -> None:
    """Equation 1 as a curve per window, with the measured points (speculative decoding Figure
    2).
    """
    with _page(path, (COLUMN, 0.7 * COLUMN) if picture.column else (8.0, 5.0), picture) as figure:
        axes, _ = add_expected_tokens(figure)
        for point in picture.points:
            for cell in tokens_per_call([point]):
                axes.plot(
                    point.counts.acceptance_rate,
                    cell.value,
                    "o",
                    ms=6,
                    mfc=_TARGET,
                    mec="white",
                    zorder=5,
                )


def _page(
    path: Path, inches: tuple[float, float], picture: Picture
) -> AbstractContextManager[Figure]:
    return paper_figure(path, inches, picture.title, picture.subtitle)


def _draw_panels(picture: Picture, path: Path, draw: Callable[..., None]) -> None:
    """A panel per data set, two beside each other, with one legend below."""
    groups: dict[str, dict[str, list[Result]]] = {}
    for (panel, row), curve in curves(picture.points, picture.row).items():
        groups.setdefault(panel, {})[row] = curve
    looks = marks(
        list(dict.fromkeys(row for panel_curves in groups.values() for row in panel_curves))
    )
    keys = [
        Line2D([], [], marker=mark.marker, color=mark.colour, ms=6, lw=1.4, label=row)
        for row, mark in looks.items()
    ]
    keys += _paper_keys(picture, groups)
    columns = 1 if picture.column else min(2, len(groups))
    lines = math.ceil(len(groups) / columns)
    width = COLUMN if picture.column else max(7.0, _PANEL[0] * columns + 0.3)
    height = 0.75 * width if picture.column else _PANEL[1]
    inches = (
        width,
        picture.heading
        + height * lines
        + picture.legend
        + 0.2 * ((len(keys) - 1) // picture.beside),
    )
    with _page(path, inches, picture) as figure:
        for place, (panel, panel_curves) in enumerate(groups.items(), start=1):
            axes = figure.add_subplot(lines, columns, place)
            as_panel(axes, panel, ylabel=_metric(panel_curves))
            draw(axes, panel, panel_curves, looks)
        _legend(figure, keys, picture.beside)


def _curve(
    axes: Axes, spots: Sequence[tuple[float, float]], look: Mark, joined: Sequence[int]
) -> None:
    for index, (x, y) in enumerate(spots):
        fill = look.colour if index in joined else "white"
        axes.plot(x, y, look.marker, ms=5.5, mfc=fill, mec=look.colour, mew=1.1, zorder=4)
    if line := [spots[index] for index in joined]:
        axes.plot(*zip(*line, strict=True), color=look.colour, linewidth=1.4, zorder=3)


def _metric(curves_of_panel: Mapping[str, Sequence[Result]]) -> str:
    """The metric of a panel's axis."""
    return next(iter(curves_of_panel.values()))[0].quality.metric


def _stars(axes: Axes, picture: Picture, panel: str, row: str, look: Mark, metric: str) -> None:
    printed = picture.published.printed
    for words in (" at minimal loss", " at one point of loss", ""):
        speed, quality = (
            printed.get((panel, row, f"{what}{words}")) for what in ("speedup", "quality")
        )
        comparable = quality is not None and picture.published.is_of(panel, metric)
        if speed is not None and comparable:
            axes.plot(1 / speed, quality, "*", ms=13, mfc=look.colour, mec=INK, mew=0.8, zorder=7)
            continue
        if speed is None and picture.stands_for is not None:
            speed = printed.get((picture.stands_for, row, f"speedup{words}"))
        if speed is not None:
            axes.axvline(1 / speed, color=look.colour, linewidth=1.1, linestyle=_DOTTED, zorder=1.5)


def quality_lines(
    axes: Axes, curves_of_panel: dict[str, list[Result]], looks: dict[str, Mark]
) -> list[tuple[float, str]]:
    """Lines at the baseline's quality and one point below. Returns each baseline with the color of
    its mark.

    Where rows have models of their own, each has its baseline, in its color.
    """
    baseline_by_row = {
        row: quality
        for row, curve in curves_of_panel.items()
        if (quality := baseline_quality(curve)) is not None
    }
    differ = (
        max(baseline_by_row.values(), default=0.0) - min(baseline_by_row.values(), default=0.0)
        > SAME_QUALITY
    )
    baselines = [
        (baseline_by_row[row], looks[row].colour, f"baseline of {row}") for row in baseline_by_row
    ]
    if not differ:
        baselines = [(quality, MUTED, "baseline") for quality, *_ in baselines[:1]]
    for quality, color, name in baselines:
        for level, text in ((quality, name), (quality - 1, "" if differ else f"{MINUS}1 point")):
            line = "-" if level == quality else _DASHED
            axes.axhline(level, color=color, linewidth=1.0, linestyle=line, zorder=1.5)
            place = {
                "xycoords": ("axes fraction", "data"),
                "textcoords": "offset points",
                "annotation_clip": False,
            }
            axes.annotate(text, (1, level), (2, 3), ha="right", size="small", color=color, **place)
    return [(quality, color if differ else INK) for quality, color, _ in baselines]


def _dots(axes: Axes, lines: Sequence[ComparedNumber], letters: int) -> None:
    """letters: of a line of a name."""
    axes.spines["left"].set_visible(False)
    for height, line in enumerate(lines):
        cell = line.cell
        if cell.low is not None and cell.high is not None:
            axes.plot(
                [cell.low, cell.high], [height, height], color=_HERE, linewidth=1.2, alpha=0.6
            )
        axes.plot(cell.value, height, "o", ms=6, color=_HERE, zorder=4)
        if line.reference is not None:
            look = {"ms": 10, **_STAR} if cell.formula is None else {"ms": 6, **_FORMULA}
            axes.plot(line.reference, height, zorder=5, **look)
    names = [textwrap.fill(f"{line.cell.panel} · {line.cell.row}", letters) for line in lines]
    axes.set_yticks(range(len(lines)), names, size="small")
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(lines) - 0.4, -0.6)


def _paper_keys(
    picture: Picture, panels: Mapping[str, Mapping[str, Sequence[Result]]]
) -> list[Line2D]:
    """The legend of the marks that `_stars` drew."""
    printed = {
        (panel, quantity.partition(" ")[0]) for panel, _, quantity in picture.published.printed
    }
    comparable = {
        panel
        for panel, panel_curves in panels.items()
        if (panel, "quality") in printed and picture.published.is_of(panel, _metric(panel_curves))
    }
    keys = []
    if any((panel, "speedup") in printed for panel in comparable):
        keys.append(_star_key())
    lone = any((panel, "speedup") in printed for panel in panels if panel not in comparable)
    if lone or (picture.stands_for, "speedup") in printed:
        keys.append(
            Line2D([], [], color=MUTED, linewidth=1.1, linestyle=_DOTTED, label="the paper's speed")
        )
    return keys


def _star_key() -> Line2D:
    return Line2D([], [], ls="", ms=10, label="paper", **_STAR)


def _legend(figure: Figure, handles: list[Line2D], beside: int) -> None:
    look = {
        "frameon": False,
        "columnspacing": 1.5,
        "handletextpad": 0.5,
        "ncols": min(len(handles), beside),
    }
    figure.legend(handles=handles, loc="outside lower center", **look)


@dataclass(frozen=True)
class TokenText:
    """A token's text. by_target: the target wrote it, not the drafter."""

    text: str
    by_target: bool


TextsByWriter = dict[str, list[TokenText]]  # one source and its texts, by who wrote them


def traced_texts(points: Sequence[Result]) -> list[TextsByWriter]:
    """The most interesting traced texts: those in which the models differ, then those with most
    target's tokens.
    """
    small: dict[str, str] = {}
    for point in points:
        if point.policy == "vanilla" and point.setting.target == point.setting.draft:
            small |= {example.id: example.prediction for example in read_examples(point.folder)}
    bild_examples = (
        example
        for point in points
        if point.policy == "bild"
        for example in read_examples(point.folder)
    )
    compared = []
    for example in bild_examples:
        if example.pieces and example.baseline_prediction is not None:
            texts = {
                "source": example.prompt,
                "large": example.baseline_prediction,
                "small": small.get(example.id, "not run"),
            }
            plain = {
                name: [TokenText(f"{word} ", False) for word in text.split()]
                for name, text in texts.items()
            }
            pieces = list(_pieces(example))
            differs = example.id in small and small[example.id] != example.baseline_prediction
            compared.append(
                (differs, sum(piece.by_target for piece in pieces), {**plain, "BiLD": pieces})
            )
    return [text for *_, text in sorted(compared, key=lambda rank: rank[:2], reverse=True)[:_TEXTS]]


def _pieces(example: MeasuredExample) -> Iterator[TokenText]:
    """Every token of a text; the last of a round is the target's, the others are drafted.

    End tokens have no text.
    """
    tokens = iter(example.token_ids)
    for drafted_round in example.rounds:
        writers = [False] * drafted_round.accepted + [True] * (drafted_round.next_token is not None)
        for token, by_target in zip(islice(tokens, len(writers)), writers, strict=False):
            text = example.pieces[str(token)]
            yield TokenText("" if text.startswith("<") and text.endswith(">") else text, by_target)


def draw_texts(picture: Picture, path: Path) -> None:
    """Source, large model, small model and BiLD, the target's tokens bold and in another colour
    (BiLD Figure 10).
    """
    lines: list[TextLine] = []
    for example_texts in traced_texts(picture.points):
        for name, pieces in example_texts.items():
            lines += _laid_out(name, pieces, MUTED if name == "source" else INK)
        lines.append([])
    # a column is as wide as a character of the font
    inches = (7.75, _HEADING + _TEXT_LINE * (len(lines) + 1))
    with _page(path, inches, picture) as figure:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.03, 0.0, 0.95, 1 - _HEADING / inches[1]))
        axes.set(xlim=(0, _WIDTH + 14), ylim=(len(lines), 0))
        axes.axis("off")
        for height, line in enumerate(lines):
            for column, text, colour, weight in line:
                look = {"size": 8, "va": "center", "family": "DejaVu Sans Mono", "weight": weight}
                axes.text(column, height + 0.5, text, color=colour, **look)
            if not line:
                axes.axhline(height + 0.5, color=HAIRLINE, linewidth=0.8)


TextLine = list[tuple[int, str, str, str]]  # column, text, colour, weight


def _laid_out(name: str, pieces: Sequence[TokenText], colour: str) -> list[TextLine]:
    """Pieces in lines of a fixed width; the first line begins with the name."""
    lines: list[TextLine] = [[(0, name, MUTED, "normal")]]
    column = 0
    for piece in pieces:
        if column + len(piece.text) > _WIDTH:
            lines.append([])
            column = 0
        text = piece.text if column else piece.text.lstrip()
        look = (_TARGET, "bold") if piece.by_target else (colour, "normal")
        lines[-1].append((10 + column, text, *look))
        column += len(text)
    return lines
