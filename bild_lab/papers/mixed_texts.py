"""Texts that two models wrote together, with the target's tokens marked (BiLD Figure 10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from matplotlib.axes import Axes

from bild_lab.lab.schema.examples import MeasuredExample, read_examples
from bild_lab.lab.schema.result import Result
from bild_lab.papers.drawings import Picture, page
from bild_lab.report.style import HAIRLINE, INK, MUTED

_TARGET = "#D55E00"
_SHOWN, _WIDTH = 4, 96  # texts, characters of a line
_LINE, _HEADING = 0.19, 0.75  # inches


@dataclass(frozen=True)
class Piece:
    """A token's text. by_target: the target wrote it, not the drafter."""

    text: str
    by_target: bool


@dataclass(frozen=True)
class Written:
    """One source and its texts. small: the drafter's own text; None if it was not run."""

    source: str
    large: str
    small: str | None
    bild: tuple[Piece, ...]

    @property
    def interest(self) -> int:
        """Ranks texts: first those in which the two models differ, then by the number of the target's tokens."""
        differs = self.small is not None and self.small != self.large
        return 1000 * differs + sum(piece.by_target for piece in self.bild)


def written(points: Sequence[Result]) -> list[Written]:
    """The most interesting texts of the traced examples."""
    small: dict[str, str] = {}
    for point in points:
        if point.policy == "vanilla" and point.setting.target == point.setting.draft:
            small |= {one.id: one.prediction for one in read_examples(point.folder)}
    texts = [
        Written(one.prompt, one.baseline_prediction, small.get(one.id), tuple(_pieces(one)))
        for point in points
        if point.policy == "bild"
        for one in read_examples(point.folder)
        if one.pieces and one.baseline_prediction is not None
    ]
    return sorted(texts, key=lambda one: -one.interest)[:_SHOWN]


def draw_texts(picture: Picture, path: Path) -> None:
    """Source, large model, small model and BiLD; the target's tokens are bold and in another colour."""
    blocks = [_block(one) for one in written(picture.points)]
    lines = [line for block in blocks for line in (*block, [])]
    inches = (7.75, _HEADING + _LINE * (len(lines) + 1))  # a column is as wide as a character of the font
    with page(path, inches, picture) as figure:
        axes = figure.add_axes((0.03, 0.0, 0.95, 1 - _HEADING / inches[1]))
        axes.set(xlim=(0, _WIDTH + 14), ylim=(len(lines), 0))
        axes.axis("off")
        for height, line in enumerate(lines):
            _draw_line(axes, height + 0.5, line)


def texts_as_markdown(points: Sequence[Result]) -> str:
    """The same texts as Markdown, the target's tokens in bold."""
    parts = []
    for one in written(points):
        marked = "".join(_bold(piece.text) if piece.by_target else piece.text for piece in one.bild)
        bild = marked.replace("****", "")  # two pieces of a word are one bold word
        small = "not run" if one.small is None else one.small
        parts.append(f"- source: {one.source}\n- large: {one.large}\n- small: {small}\n- BiLD: {bild.strip()}")
    return "\n\n".join(parts)


def _bold(text: str) -> str:
    """Bold in Markdown: the marks touch the word, so the space before it stays outside."""
    word = text.strip()
    return text.replace(word, f"**{word}**") if word else text


TextLine = list[tuple[int, str, str, bool]]  # column, text, colour, bold


def _block(one: Written) -> list[TextLine]:
    plain = {"source": one.source, "large": one.large, "small": "not run" if one.small is None else one.small}
    lines: list[TextLine] = []
    for name, text in plain.items():
        lines += _laid_out(name, [Piece(word, False) for word in _words(text)], INK if name != "source" else MUTED)
    return [*lines, *_laid_out("BiLD", one.bild, INK)]


def _laid_out(name: str, pieces: Sequence[Piece], colour: str) -> list[TextLine]:
    """Pieces in lines of a fixed width; the first line begins with the name."""
    lines: list[TextLine] = [[(0, name, MUTED, False)]]
    column = 0
    for piece in pieces:
        if column + len(piece.text) > _WIDTH:
            lines.append([])
            column = 0
        text = piece.text if column else piece.text.lstrip()
        lines[-1].append((10 + column, text, _TARGET if piece.by_target else colour, piece.by_target))
        column += len(text)
    return lines


def _draw_line(axes: Axes, height: float, line: TextLine) -> None:
    for column, text, colour, bold in line:
        own = {"weight": "bold"} if bold else {}
        axes.text(column, height, text, size=8, color=colour, va="center", family="DejaVu Sans Mono", **own)
    if not line:
        axes.axhline(height, color=HAIRLINE, linewidth=0.8)


def _pieces(example: MeasuredExample) -> Iterator[Piece]:
    """Every token of a text; the last of a round is the target's, the others are drafted."""
    tokens, names = iter(example.token_ids), example.pieces
    for one in example.rounds:
        for token in islice(tokens, one.accepted):
            yield Piece(_shown(names[str(token)]), False)
        if one.next_token is not None:
            for token in islice(tokens, 1):
                yield Piece(_shown(names[str(token)]), True)


def _shown(piece: str) -> str:
    """The text of a token; an end token has none."""
    return "" if piece.startswith("<") and piece.endswith(">") else piece


def _words(text: str) -> list[str]:
    return [f"{word} " for word in text.split()]
