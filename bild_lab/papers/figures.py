"""Every table and figure of the papers, drawn from outputs, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.formatting import short_name
from bild_lab.lab.schema.result import Result
from bild_lab.papers import cells as cells_of
from bild_lab.papers import finished_points as rows
from bild_lab.papers.drawings import (
    Drawing,
    Picture,
    draw_dots,
    draw_engagement,
    draw_tokens_per_call,
    draw_trade_offs,
)
from bild_lab.papers.finished_points import RowOf, read_points
from bild_lab.papers.match_rates import Rate, read_rates
from bild_lab.papers.mixed_texts import draw_texts, texts_as_markdown
from bild_lab.papers.published import SCALES, Published, load_published
from bild_lab.papers.replayed_points import Replayed, read_replayed
from bild_lab.papers.verdicts import AGREES, UNKNOWN, Comparison, compare, markdown
from bild_lab.report.provenance import caption, notes


@dataclass(frozen=True)
class PaperFigure:
    """How outputs become a figure.

    cells: computes a run's numbers. row: which curve a point belongs to. borrowed: rows that come from another
    figure's folder; a data set with only these gets no panel. read: reads the points of folders. texts: Markdown that
    follows the tables.
    """

    cells: Callable[[Sequence[Any]], list[cells_of.Cell]]
    draw: Drawing = draw_dots
    row: RowOf = rows.policy
    borrowed: frozenset[str] = frozenset()
    read: Callable[[Sequence[Path]], list[Any]] = read_points
    texts: Callable[[Sequence[Result]], str] = lambda _: ""


def _trade_off(row: RowOf, *borrowed: str) -> PaperFigure:
    return PaperFigure(cells_of.at_losses(row), draw_trade_offs, row, frozenset(borrowed))


def _match_rates(positions: bool) -> PaperFigure:
    def cells(rates: Sequence[tuple[str, Rate]]) -> list[cells_of.Cell]:
        return cells_of.match_rates(rates, positions)

    return PaperFigure(cells, read=read_rates)


FIGURES = {
    "bild_fig2": PaperFigure(cells_of.replaced_share, draw_engagement, lambda _: "small model", read=read_replayed),
    "bild_fig4": _trade_off(rows.alignment),
    "bild_fig5": _trade_off(rows.ablation, "bild"),
    "bild_fig6_7": _trade_off(rows.policy),
    "bild_fig8": PaperFigure(cells_of.cost_ratios),
    "bild_fig9": _trade_off(rows.rollback_threshold),
    "bild_fig10": PaperFigure(lambda _: [], draw_texts, texts=texts_as_markdown),
    "bild_speculative": PaperFigure(
        cells_of.against_speculative, draw_trade_offs, rows.unaligned_or_speculative, frozenset({"bild"})
    ),
    "bild_cascades": _trade_off(rows.lossy_rule, "bild"),
    "spec_tab2": PaperFigure(cells_of.speculative_table),
    "spec_tab3": PaperFigure(cells_of.speculative_table),
    "spec_tab4": PaperFigure(cells_of.theorem_table),
    "spec_tab5": PaperFigure(cells_of.lenience_table),
    "spec_fig2_4": PaperFigure(cells_of.tokens_per_call, draw_tokens_per_call),
    "bita_tab1": PaperFigure(cells_of.greedy_speedups(rows.pair)),
    "bita_tab2": PaperFigure(cells_of.greedy_speedups(rows.policy, rows.pair)),
    "bita_tab3_8": PaperFigure(cells_of.greedy_speedups(rows.prompt_design)),
    "bita_tab4_9": PaperFigure(cells_of.greedy_speedups(rows.tree)),
    "bita_tab7": PaperFigure(cells_of.by_category),
    "bita_fig7": PaperFigure(cells_of.greedy_speedups(rows.policy, rows.pair)),
    "bita_fig8": PaperFigure(cells_of.greedy_speedups(rows.prompt_tokens)),
    "bita_fig9": PaperFigure(cells_of.greedy_speedups(rows.mask_tokens)),
    "ppd_tab1": _match_rates(positions=False),
    "ppd_tab4_6": _match_rates(positions=True),
    "ppd_fig2": PaperFigure(cells_of.pipeline_trade_off),
    "ppd_fig4": PaperFigure(cells_of.pipeline_compute),
}


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn. path: of the files, without the suffixes .png, .pdf and .md."""

    name: str
    scale: str
    path: Path
    comparison: Comparison

    @property
    def summary(self) -> str:
        """The files, then a line for each claim, those that hold first, and one that counts the numbers that agree.

        Numbers beside a formula are not counted.
        """
        lines = [f"{self.path}.png, .pdf, .md: {self.scale} scale"]
        for one in self.comparison.claims:
            where = "" if one.verdict == UNKNOWN else f" ({one.panel})"
            lines.append(f"{one.verdict}: {one.order.claim}{where}")
        beside = [one for one in self.comparison.lines if one.beside is not None and one.cell.formula is None]
        agree = sum(line.verdict == AGREES for line in beside)
        others = ", whose models, data and hardware are others" if self.scale == "small" else ""
        if beside:
            agrees = "agrees" if agree == 1 else "agree"
            lines.append(f"{agree} of {len(beside)} numbers {agrees} with the paper{others}")
        return "\n  ".join(lines)


def draw_figure(name: str, outputs: Path, folder: Path, scale: str | None = None) -> Drawn:
    """Draw a figure from its points in outputs. scale: "paper" or "small"; None takes the first that has points.

    Raises:
        UserError: there is no such figure or scale, or it has no points in outputs; the message says what to run.
    """
    published = load_published(name)
    if scale is not None and scale not in SCALES:
        raise UserError(f"scale must be {' or '.join(SCALES)}, got {scale!r}")
    figure = FIGURES[name]
    for one in SCALES if scale is None else (scale,):
        points = measured(figure, published, outputs, one)
        if points:
            return _drawn(name, figure, published, points, one, folder)
    raise UserError(_nothing(name, published, outputs, scale))


def measured(figure: PaperFigure, published: Published, outputs: Path, scale: str) -> list[Any]:
    """The figure's points in its folders; empty if they give no number and no text."""
    found = figure.read([outputs / name for name in published.folders[scale]])
    if figure.borrowed:
        own = {panel for panel, row in rows.curves(found, figure.row) if row not in figure.borrowed}
        found = [point for point in found if point.setting.dataset in own]
    return found if figure.cells(found) or figure.texts(found) else []


def _drawn(name: str, figure: PaperFigure, published: Published, points: list[Any], scale: str, folder: Path) -> Drawn:
    comparison = compare(figure.cells(points), published, scale)
    path = folder / (name if scale == "paper" else f"{name}_small")
    beside = published.stands_for.panel if scale == "small" else None
    title = f"{published.item} ({published.paper.partition(',')[0]})"
    subtitle = ", ".join(filter(None, (_where(points), caption([one for one in points if isinstance(one, Result)]))))
    picture = Picture(title, subtitle, points, figure.row, comparison, published, beside)
    figure.draw(picture, path.with_suffix(".png"))
    drawn = Drawn(name, scale, path, comparison)
    parts = [_heading(published, points, drawn), markdown(comparison), figure.texts(points)]
    write_atomically(path.with_suffix(".md"), ("\n\n".join(part for part in parts if part) + "\n").encode())
    return drawn


def _heading(published: Published, points: list[Any], drawn: Drawn) -> str:
    name, scale, comparison = drawn.name, drawn.scale, drawn.comparison
    parts = [
        f"# {published.item}",
        f"{published.paper}. The paper's hardware: {published.hardware}. Here: {_where(points)}.",
        published.given,
        *_unmatched(published, comparison),
        *notes([point for point in points if isinstance(point, Result)]),
    ]
    if scale == "small":
        parts.append(
            "Small scale: other models, data and hardware than the paper's, so a verdict says how far apart two "
            "numbers are, not that either is wrong. "
            f"Numbers are compared with the paper's {published.stands_for.panel}."
        )
    parts.append(f"Drawn by `python scripts/figures.py {name} scale={scale}`.")
    parts.append(f"![{published.item}]({drawn.path.name}.png)")
    return "\n\n".join(parts)


def _unmatched(published: Published, comparison: Comparison) -> list[str]:
    count = len(published.printed)
    return [f"Of the {count} printed numbers {comparison.missing} were not measured."] if count else []


def _where(points: Sequence[Any]) -> str:
    """The targets, data, examples and hardware of the points."""
    settings = [point.setting for point in points if isinstance(point, Result | Replayed)]
    if not settings:
        return f"match rates on {_listed(dataset for dataset, _ in points)}"
    targets = _listed(short_name(one.target) for one in settings)
    data = _listed(f"{one.dataset} {one.split}" for one in settings)
    examples = _listed(str(one.n_examples) for one in settings)
    hardware = _listed(str(one.hardware or one.device) for one in settings)
    return f"{targets} on {data}, {examples} examples, {_listed(one.dtype for one in settings)}, {hardware}"


def _listed(values: Any) -> str:
    several = list(dict.fromkeys(values))
    return ", ".join(several) if len(several) <= 3 else f"{several[0]} and {len(several) - 1} others"


def _nothing(name: str, published: Published, outputs: Path, scale: str | None) -> str:
    """What the figure needs, and the commands that make it, one a line."""
    scales = SCALES if scale is None else (scale,)
    folders = dict.fromkeys(str(outputs / each) for one in scales for each in published.folders[one])
    lines = [f"{name} wants finished points in {' or '.join(folders)}, got none"]
    for one in scales:
        commands = published.commands[one]
        if one == "small" and not commands:
            commands = [f"the one of conf/experiment named {published.folders['small'][0]}"]
        lines.append("at the paper's scale run" if one == "paper" else "at small scale run")
        lines += [f"  {command}" for command in commands]
    if published.commands["small"] and "small" in scales:
        lines += ["or let this command run them", f"  python scripts/figures.py {name} scale=small run=true"]
    return "\n".join(lines)
