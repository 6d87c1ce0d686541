"""Draw when the models ran in one example, by point: python scripts/trace_diagram.py outputs/NAME [KEY=VALUE …]

example=ID    a traced example; default: the one of median length
output=FILE   default: trace.png in the folder
"""

from __future__ import annotations

import sys
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.lab.cli import output, run_application, stages


def main() -> None:
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    folders = [word for word in sys.argv[1:] if "=" not in word]
    if unknown := sorted(set(settings) - {"example", "output"}):
        raise UserError(f"settings are example=ID and output=FILE, got {unknown[0]}; leave it out")
    if len(folders) != 1:
        raise UserError(f"one folder is needed, got {len(folders)}; give the folder of a sweep, outputs/NAME")
    stages.enter("loading libraries")
    from bild_lab.lab.results.records import Sweep  # late: torch takes seconds to load
    from bild_lab.papers.timeline_figure import draw_trace, timelines_of

    folder = Path(folders[0])
    timelines = timelines_of(Sweep(folder), settings.get("example"))
    file = Path(settings.get("output", folder / "trace.png"))
    draw_trace(timelines, file)
    output.print(f"{file} shows example {timelines.example}")


if __name__ == "__main__":
    run_application(main, None)
