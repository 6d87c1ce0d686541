"""Draw Figures 2 and 4 of predictive pipelined decoding, with simulations: python scripts/ppd_theory.py"""

from __future__ import annotations

import sys
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.cli import output, run_application, stages
from bild_lab.report.book.after import update

FOLDER = Path("outputs/ppd_theory")


def main() -> None:
    if sys.argv[1:]:
        raise UserError(f"this command takes no words, got {sys.argv[1]!r}; leave it out")
    stages.enter("loading libraries")
    from bild_lab.papers.ppd import draw_compute_per_time_unit, draw_compute_per_token

    stages.enter("simulating and drawing")
    drawn = {"figure_2": draw_compute_per_time_unit, "figure_4": draw_compute_per_token}
    for name, draw in drawn.items():
        draw(FOLDER / f"{name}.png")
    output.print(f"{FOLDER} contains {' and '.join(drawn)}: each as PNG, with its numbers as CSV")
    update()


if __name__ == "__main__":
    run_application(main, None)
