"""Every table and figure of the papers, drawn from outputs, with the paper's numbers beside
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError, require_choice
from bild_lab.files import write_atomically
from bild_lab.lab.config.schemas import PICTURE_KINDS
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import setting_title
from bild_lab.papers import cells, match_rates, recorded_quality
from bild_lab.papers import drawings as draw
from bild_lab.papers.published import (
    AGREES,
    SCALES,
    UNKNOWN,
    Comparison,
    Published,
    compare,
    load_published,
    markdown,
)
from bild_lab.report.provenance import caption, notes
from bild_lab.report.style import VECTOR


@dataclass(frozen=True)
class PaperFigure:
    """How outputs become a figure.

    numbers: computes a run's cells. row: which curve a point belongs to. borrowed: rows that come
    from another figure's folder; a data set with only these gets no panel. read: reads the points
    of folders.
    """

    numbers: cells.Cells
    drawing: draw.Drawing = draw.draw_dots
    row: cells.RowOf = cells.policy
    borrowed: frozenset[str] = frozenset()
    read: Callable[[Sequence[Path]], list[Any]] = cells.read_points


def _trade_off(row: cells.RowOf, *borrowed: str) -> PaperFigure:
    return PaperFigure(
        partial(cells.at_losses, row=row), draw.draw_trade_offs, row, frozenset(borrowed)
    )


def _bita(row: cells.RowOf, panel: cells.RowOf = cells.dataset) -> PaperFigure:
    return PaperFigure(
        cells.table(row, {"greedy speedup": lambda point: point.tokens_per_s_ratio}, panel)
    )


def _match_rates(positions: bool) -> PaperFigure:
    return PaperFigure(partial(cells.match_rates, positions=positions), read=match_rates.read_rates)


_SPEEDUP = {"speedup": lambda point: point.speedup}
_ALPHA = {"acceptance rate": lambda point: point.counts.acceptance_rate}
_EXPECTED = {"acceptance rate": lambda point: point.counts.expected_acceptance}
_THEOREM = {"Theorem 3.8": cells.theorem}
FIGURES = {
    "bild_fig2": PaperFigure(cells.replaced_share, draw.draw_engagement, lambda _: "small model"),
    "bild_fig4": _trade_off(cells.alignment),
    "bild_fig5": _trade_off(cells.ablation, "bild"),
    "bild_fig6_7": _trade_off(cells.policy),
    "bild_fig8": PaperFigure(cells.cost_ratios),
    "bild_fig9": _trade_off(cells.rollback_threshold),
    "bild_fig10": PaperFigure(lambda _: [], draw.draw_texts),
    "bild_speculative": PaperFigure(
        cells.against_speculative,
        draw.draw_trade_offs,
        cells.unaligned_or_speculative,
        frozenset({"bild"}),
    ),
    "bild_lossy": _trade_off(cells.lossy_rule, "bild"),
    "spec_tab2": PaperFigure(cells.table(cells.drafter, _SPEEDUP | _ALPHA, by_temperature=True)),
    "spec_tab3": PaperFigure(cells.table(cells.drafter, _EXPECTED, by_temperature=True)),
    "spec_tab4": PaperFigure(cells.theorem_table),
    "spec_tab5": PaperFigure(
        cells.table(cells.lenience, _ALPHA | _THEOREM | _SPEEDUP, by_temperature=True)
    ),
    "spec_fig2_4": PaperFigure(cells.tokens_per_call, draw.draw_tokens_per_call),
    "bita_tab1": _bita(cells.pair),
    "bita_tab2": _bita(cells.policy, cells.pair),
    "bita_tab3_8": _bita(cells.prompt_design),
    "bita_tab4_9": _bita(cells.tree),
    "bita_tab7": PaperFigure(cells.by_category),
    "bita_fig7": _bita(cells.policy, cells.pair),
    "bita_fig8": _bita(cells.prompt_tokens),
    "bita_fig9": _bita(cells.mask_tokens),
    "ppd_tab1": _match_rates(positions=False),
    "ppd_tab4_6": _match_rates(positions=True),
    "ppd_fig2": PaperFigure(cells.pipeline_trade_off),
    "ppd_fig4": PaperFigure(cells.pipeline_compute),
}


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn. path: of the files, without a suffix. kinds: of the pictures, beside
    the .md.
    """

    scale: str
    path: Path
    comparison: Comparison
    kinds: Sequence[str]

    @property
    def summary(self) -> str:
        """The files, then a line for each claim, those that hold first, and one that counts the
        numbers that agree.

        Numbers beside a formula are not counted.
        """
        lines = [f"{self.path}.{', .'.join([*self.kinds, 'md'])}: {self.scale} scale"]
        for claim in self.comparison.claims:
            where = "" if claim.verdict == UNKNOWN else f" ({claim.panel})"
            lines.append(f"{claim.verdict}: {claim.order.claim}{where}")
        beside = [
            line
            for line in self.comparison.lines
            if line.beside is not None and line.cell.formula is None
        ]
        agree = sum(line.verdict == AGREES for line in beside)
        caveat = ", whose models, data and hardware are others" if self.scale == "small" else ""
        if beside:
            agrees = "agrees" if agree == 1 else "agree"
            lines.append(f"{agree} of {len(beside)} numbers {agrees} with the paper{caveat}")
        return "\n  ".join(lines)


def draw_figure(
    name: str,
    outputs: Path,
    folder: Path,
    scale: str | None = None,
    kinds: Sequence[str] = PICTURE_KINDS,
) -> Drawn:
    """Draw a figure from its points in outputs. scale: "paper" or "small"; None takes the first
    that has points.

    kinds: "png" for a screen, "pdf" and "svg" as wide as a column of a paper.

    Raises:
        UserError: there is no such figure or scale, or it has no points in outputs; the message says what to run.
    """
    published = load_published(name)
    require_choice("scale", scale, (*SCALES, None))
    scales = SCALES if scale is None else (scale,)
    for candidate in scales:
        if points := measured(FIGURES[name], published, outputs, candidate):
            return _drawn(
                name,
                published,
                points,
                candidate,
                folder / (name if candidate == "paper" else f"{name}_small"),
                kinds,
            )
    raise UserError(_nothing(name, published, outputs, scales))


def measured(figure: PaperFigure, published: Published, outputs: Path, scale: str) -> list[Any]:
    """The figure's points in its folders; empty if they give no number and no text."""
    points = figure.read([outputs / name for name in published.folders[scale]])
    if figure.borrowed:
        panels = {
            panel for panel, row in cells.curves(points, figure.row) if row not in figure.borrowed
        }
        points = [point for point in points if cells.dataset(point) in panels]
    has_texts = figure.drawing is draw.draw_texts and draw.written(points)
    return points if figure.numbers(points) or has_texts else []


def _drawn(
    name: str, published: Published, points: list[Any], scale: str, path: Path, kinds: Sequence[str]
) -> Drawn:
    figure = FIGURES[name]
    results = [point for point in points if isinstance(point, Result)]
    comparison = compare(figure.numbers(points), published, scale)
    title, where = f"{published.item} ({published.paper.partition(',')[0]})", _where(points)
    beside = published.stands_for.panel if scale == "small" else None
    protocol = recorded_quality.protocol(results) if published.recorded else ""
    subtitle = ", ".join(filter(None, (where, protocol, caption(results))))
    picture = draw.Picture(title, subtitle, points, figure.row, comparison, published, beside)
    for kind in kinds:
        figure.drawing(replace(picture, column=kind in VECTOR), path.with_suffix(f".{kind}"))
    count = len(published.printed)
    parts = [
        f"# {published.item}",
        f"{published.paper}. The paper's hardware: {published.hardware}. Here: {where}.",
        published.given,
        f"Of the {count} printed numbers {comparison.missing} were not measured." if count else "",
        *(recorded_quality.notes(results) if published.recorded else ()),
        *notes(results),
        (
            "Small scale: other models, data and hardware than the paper's, so a verdict says how"
            " different two numbers are, not that either is wrong. Numbers are compared with the"
            f" paper's {published.stands_for.panel}."
            if scale == "small"
            else ""
        ),
        f"Drawn by `python scripts/figures.py {name} scale={scale}`.",
        f"![{published.item}]({path.name}.{kinds[0]})",
        markdown(comparison),
    ]
    write_atomically(path.with_suffix(".md"), ("\n\n".join(filter(None, parts)) + "\n").encode())
    return Drawn(scale, path, comparison, kinds)


def _where(points: Sequence[Any]) -> str:
    """The models, data, examples and hardware of the points."""
    settings = [point.setting for point in points if isinstance(point, Result)]
    titles = [
        f"{setting_title(setting)}, {setting.dtype}, {setting.hardware or setting.device}"
        for setting in settings
    ]
    known = list(dict.fromkeys(titles or [f"match rates on {dataset}" for dataset, _ in points]))
    return "; ".join(known[:3]) + (f" and {len(known) - 3} others" if len(known) > 3 else "")


def _nothing(name: str, published: Published, outputs: Path, scales: Sequence[str]) -> str:
    """What the figure needs, and the commands that make it, one a line. scales: those that were
    asked for.
    """
    folders = dict.fromkeys(
        str(outputs / folder) for candidate in scales for folder in published.folders[candidate]
    )
    commands = [
        f"  python scripts/paper_run.py {name} scale={candidate} run=true" for candidate in scales
    ]
    wants = f"{name} wants finished points in {' or '.join(folders)}, got none"
    return "\n".join([f"{wants}; run, or without run=true list, all that they need:", *commands])
