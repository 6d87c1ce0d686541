"""Draw Figures 2 to 4 of speculative decoding: python scripts/theory.py"""

from __future__ import annotations

import sys
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.cli import output, run_application, stages
from bild_lab.report.book.after import update

FOLDER = Path("outputs/theory")


def main() -> None:
    if sys.argv[1:]:
        raise UserError(f"this command takes no words, got {sys.argv[1]!r}; leave it out")
    stages.enter("loading libraries")
    from bild_lab.papers.speculative_curves import draw_expected_tokens, draw_optimal_window, draw_speed_and_operations

    stages.enter("drawing")
    drawn = {"figure_2": draw_expected_tokens, "figure_3": draw_optimal_window, "figure_4": draw_speed_and_operations}
    for name, draw in drawn.items():
        draw(FOLDER / f"{name}.png")
    output.print(f"{FOLDER} contains {', '.join(drawn)}: each as PNG, with its numbers as CSV")
    update()


if __name__ == "__main__":
    run_application(main, None)
