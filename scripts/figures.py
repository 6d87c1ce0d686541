"""Draw the papers' tables and figures from outputs, with their numbers: python scripts/figures.py FIGURE [FIGURE …]

    python scripts/figures.py bild_fig4              # from outputs: at the paper's scale if there, else at small scale
    python scripts/figures.py bild_fig4 scale=small outputs=DIR
    python scripts/figures.py all                    # every figure with at least one finished point
    python scripts/figures.py bild_fig4 format=pdf,svg   # png is for a screen, the others are 8 cm wide for a paper
    python scripts/figures.py all scale=small run=true   # runs the missing small experiments first

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
    """What the command line asks for. run: run the missing small experiments first."""

    figures: list[str]
    outputs: Path
    scale: str | None
    run: bool
    kinds: list[str]


def parse(words: Sequence[str]) -> FigureOptions:
    """Read figures, and settings as key=value. Raises UserError for anything else."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if unknown := sorted(set(settings) - {"outputs", "scale", "run", "format"}):
        known = "outputs=DIR, scale=paper|small, format=png,pdf,svg and run=true"
        meant = suggestion(unknown[0], ("outputs", "scale", "run", "format")) or "; leave it out"
        raise UserError(f"settings are {known}, got {unknown[0]}{meant}")
    kinds = picture_kinds(settings.get("format", PICTURE_KINDS))
    if settings.get("run", "false") not in ("true", "false"):
        raise UserError(f"run must be true or false, got {settings['run']!r}")
    if not names:
        raise UserError(
            f"a figure is needed, got none; choose from {', '.join(published_names())}, or {ALL}"
        )
    run = settings.get("run") == "true"
    outputs = Path(settings.get("outputs", "outputs"))
    if run and (settings.get("scale") != "small" or outputs != Path("outputs")):
        raise UserError(
            "run=true runs the small experiments, which write to outputs; give scale=small and no"
            " outputs=DIR with it"
        )
    figures = published_names() if names == [ALL] else [name.replace("/", "_") for name in names]
    for name in figures:
        require_choice("figure", name, published_names())
    return FigureOptions(figures, outputs, settings.get("scale"), run, kinds)


def run_missing(name: str) -> None:
    """Run the steps of a figure that are not done.

    Raises UserError if one was not; the output says why.
    """
    from bild_lab.papers.runs.machine import machine_of
    from bild_lab.papers.runs.step_runs import run_steps
    from bild_lab.papers.runs.steps import steps_of

    status_line.leave()
    steps = [step for step in steps_of(name, "small") if step.figure is None]
    if not run_steps(steps, machine_of(None, tries=False), console.print):
        raise UserError(f"{name}: a step failed, and the figure needs its results")


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
            if options.run:
                run_missing(name)
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
            "[dim]A figure alone says what makes it; `scale=small run=true` runs the small"
            " experiments.[/dim]"
        )
    if failed and len(failed) == len(options.figures) > 1:
        raise UserError("no figure was drawn; the messages above say what each one needs")


if __name__ == "__main__":
    run_application(main, None)
