"""Draw Figures 2 to 4 of speculative decoding, and points of sweeps: python scripts/theory.py [outputs/NAME …]"""

from __future__ import annotations

import sys
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.cli import output, run_application, stages
from bild_lab.lab.schema.result import Result
from bild_lab.report.book.after import update

FOLDER = Path("outputs/theory")


def measured(folders: list[str]) -> list[Result]:
    """Every finished point of the sweeps."""
    from bild_lab.lab.results.records import Sweep  # late: torch takes seconds to load

    results: list[Result] = []
    for folder in folders:
        found = Sweep(Path(folder)).results()
        if not found:
            raise UserError(f"{folder} has no finished points; give folders of sweeps, outputs/NAME")
        results += found
    return results


def main() -> None:
    stages.enter("loading libraries")
    from bild_lab.papers.speculative_curves import (
        draw_expected_tokens,
        draw_measured,
        draw_optimal_window,
        draw_speed_and_operations,
    )

    stages.enter("drawing")
    names = []
    if folders := sys.argv[1:]:  # first, because bad folders raise an error
        draw_measured(measured(folders), FOLDER / "figure_4_measured.png")
        names = ["figure_4_measured"]
    drawn = {"figure_2": draw_expected_tokens, "figure_3": draw_optimal_window, "figure_4": draw_speed_and_operations}
    for name, draw in drawn.items():
        draw(FOLDER / f"{name}.png")
    output.print(f"{FOLDER} contains {', '.join([*drawn, *names])}: each as PNG, with its numbers as CSV")
    update()


if __name__ == "__main__":
    run_application(main, None)
