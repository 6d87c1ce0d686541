"""Pack a sweep for an artifact evaluation: python scripts/artifact.py outputs/NAME [zip=true]

    python scripts/artifact.py outputs/first                  # writes outputs/first/artifact, with its README.md
    python scripts/artifact.py outputs/first zip=true         # and artifact.zip beside it
    python scripts/artifact.py check outputs/first/artifact   # compares hashes, and computes the numbers again

The folder holds the points, versions and hashes of software, models and data, the commands, and the expected results.
The check needs no GPU, no models and no data; it exits with 1 if something does not fit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rich.markup import escape

from bild_lab.errors import UserError
from bild_lab.lab.config.console import output, status_line
from bild_lab.lab.config.entrypoint import run_application

USAGE = (
    "give the folder of a sweep, outputs/NAME, with zip=true if you like, or check and the folder"
    " of an artifact"
)


def main() -> None:
    """Raises UserError for other words, and for a folder that is no sweep or no artifact."""
    words = sys.argv[1:]
    checks, zipped = "check" in words[:1], "zip=true" in words
    folders = [word for word in words[checks:] if word not in ("zip=true", "zip=false")]
    if len(folders) != 1 or (checks and zipped):
        raise UserError(f"{USAGE}; got {' '.join(words) or 'nothing'}")
    status_line.enter("loading libraries")
    # late: torch takes seconds to load
    from bild_lab.lab.store.records import Sweep, require_writable
    from bild_lab.report.page.artifact import faults, write_artifact

    folder = Path(folders[0]).expanduser()
    if checks:
        check(folder, list(faults(folder)))
        return
    status_line.enter("packing")
    require_writable(folder)
    written = write_artifact(Sweep(folder))
    output.print(
        escape(f"{written}/README.md is the appendix; fill in where the code is and its DOI")
    )
    if zipped:
        packed = shutil.make_archive(str(written), "zip", written.parent, written.name)
        output.print(escape(f"{packed} holds all of it"))


def check(folder: Path, faults: list[str]) -> None:
    """Print what is wrong, and exit with 1 if something is."""
    for fault in faults:
        output.print(escape(fault))
    if faults:
        sys.exit(1)
    output.print(
        escape(
            f"{folder}: files are as they were packed; speedups, counts of tokens and equal texts"
            " follow from the stored texts and times"
        )
    )


if __name__ == "__main__":
    run_application(main, None)
