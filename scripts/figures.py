"""Draw the papers' tables and figures from outputs, with their numbers: python scripts/figures.py FIGURE [FIGURE …]

    python scripts/figures.py bild_fig4              # from outputs: at the paper's scale if there, else at small scale
    python scripts/figures.py bild_fig4 scale=small outputs=DIR
    python scripts/figures.py all                    # every figure with at least one finished point
    python scripts/figures.py bild_fig4 format=pdf,svg   # png is for a screen, the others are 8 cm wide for a paper

Each figure is written to outputs/figures/FIGURE.png and .pdf, its numbers and verdicts to FIGURE.md. At small scale
the name is FIGURE_small. What a paper draws by equations alone is FIGURE_theory.png, without any results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.markup import escape

from bild_lab.errors import UserError, require_choice, suggestion
from bild_lab.lab.config.console import console, output, status_line
from bild_lab.lab.config.entrypoint import run_application
from bild_lab.lab.config.schemas import PICTURE_KINDS, picture_kinds
from bild_lab.papers.published import published_names

ALL = "all"


@dataclass(frozen=True)
class FigureOptions:
    """What the command line asks for."""

    figures: list[str]
    outputs: Path
    scale: str | None
    kinds: list[str]


def parse(words: Sequence[str]) -> FigureOptions:
    """Read figures, and settings as key=value. Raises UserError for anything else."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if unknown := sorted(set(settings) - {"outputs", "scale", "format"}):
        known = "outputs=DIR, scale=paper|small and format=png,pdf,svg"
        meant = suggestion(unknown[0], ("outputs", "scale", "format")) or "; leave it out"
        raise UserError(f"settings are {known}, got {unknown[0]}{meant}")
    kinds = picture_kinds(settings.get("format", PICTURE_KINDS))
    if not names:
        raise UserError(
            f"a figure is needed, got none; choose from {', '.join(published_names())}, or {ALL}"
        )
    outputs = Path(settings.get("outputs", "outputs"))
    figures = published_names() if names == [ALL] else [name.replace("/", "_") for name in names]
    for name in figures:
        require_choice("figure", name, published_names())
    return FigureOptions(figures, outputs, settings.get("scale"), kinds)


def draw(options: FigureOptions) -> list[str]:
    """Draw every figure.

    If there are several, returns the first line of what each that could not be drawn needs.
    """
    status_line.enter("loading libraries")
    # imported late: pandas and matplotlib take a second
    from bild_lab.papers.figures import draw_figure

    failed: list[str] = []
    for name in options.figures:
        curves: list[Path] = []
        try:
            status_line.enter(f"drawing {name}")
            curves = draw_theory(name, options.outputs / "figures", options.kinds[0])
            drawn = draw_figure(
                name, options.outputs, options.outputs / "figures", options.scale, options.kinds
            )
            output.print(escape(drawn.summary))
        except UserError as error:
            alone = len(options.figures) == 1
            if alone and not curves:
                raise
            # without the commands
            failed.append(str(error) if alone else str(error).partition("\n")[0])
    return failed


def draw_theory(name: str, folder: Path, kind: str) -> list[Path]:
    """Draw what a figure shows by equations alone, with its values as CSV; nothing for figures that
    are measured.
    """
    from bild_lab.papers import theory

    curves = {
        "spec_fig2_4": {
            "spec_fig2": theory.draw_expected_tokens,
            "spec_fig3": theory.draw_optimal_window,
            "spec_fig4": theory.draw_speed_and_operations,
        },
        "ppd_fig2": {"ppd_fig2": partial(theory.draw_trade_offs, compute="compute_per_time_unit")},
        "ppd_fig4": {"ppd_fig4": partial(theory.draw_trade_offs, compute="compute_per_token")},
    }
    files = {
        folder / f"{figure}_theory.{kind}": draw for figure, draw in curves.get(name, {}).items()
    }
    for file, draw in files.items():
        draw(file)
        output.print(escape(f"{file}: the equations' curves, with their values as CSV"))
    return list(files)


def main() -> None:
    options = parse(sys.argv[1:])
    failed = draw(options)
    for message in failed:
        console.print(f"[dim]{escape(message)}[/dim]")
    if failed:
        console.print(
            "[dim]A figure alone says what makes it; `python scripts/paper_run.py FIGURE scale=small"
            " run=true` runs its small experiments.[/dim]"
        )
    if failed and len(failed) == len(options.figures) > 1:
        raise UserError("no figure was drawn; the messages above say what each one needs")


if __name__ == "__main__":
    run_application(main, None)
