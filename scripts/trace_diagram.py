"""Draw when the models ran in one example, for each point of a sweep: python scripts/trace_diagram.py outputs/NAME"""

from __future__ import annotations

import argparse
from pathlib import Path

from bild_lab.lab.cli import output, run_application
from bild_lab.lab.results.records import Sweep
from bild_lab.papers.timeline_figure import draw_trace, timelines_of


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw each point's calls on one traced example, as a PNG.")
    parser.add_argument("folder", type=Path, help="the folder of a sweep, outputs/NAME")
    parser.add_argument("--example", metavar="ID", help="a traced example; default: the one of median length")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: trace.png in the folder")
    arguments = parser.parse_args()
    timelines = timelines_of(Sweep(arguments.folder), arguments.example)
    file = arguments.output or arguments.folder / "trace.png"
    draw_trace(timelines, file)
    others = f"; {timelines.left_out} more traced points have no lane" if timelines.left_out else ""
    output.print(f"{file} shows example {timelines.example}{others}")


if __name__ == "__main__":
    run_application(main)
