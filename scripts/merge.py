"""Merge several sweeps, such as those of several machines, into one: python scripts/merge.py name=all DIR DIR

The sources are only read. If two sources have the same point, the newest measurement is kept. Points of different
hardware, code or package versions have different settings, so their timings never share a curve.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, refusing, run_application, words_as_list
from bild_lab.lab.config import config_dir

if TYPE_CHECKING:
    from bild_lab.lab.results.records import Sweep


def merge(cfg: DictConfig) -> None:
    """Copy the points, print where they came from, and write the report. Raises UserError for bad input."""
    if not cfg.sweeps:
        raise UserError("folders of sweeps are needed, got none; python scripts/merge.py name=all outputs/A outputs/B")
    from bild_lab.lab.point import sweep_folder
    from bild_lab.lab.results.commands import record_command
    from bild_lab.lab.results.records import Sweep, require_writable  # late: torch takes seconds to load
    from bild_lab.report.sweep import report_sweep

    merged = Sweep(sweep_folder(cfg))
    sources = [Sweep(Path(str(folder)).expanduser()) for folder in cfg.sweeps]
    for source in sources:
        if source.folder.resolve() == merged.folder.resolve():
            raise UserError(f"{source.folder} cannot be merged into itself; choose another name=NAME")
        if not source.results():
            raise UserError(f"{source.folder} has no finished points; give the folder of a sweep, outputs/NAME")
    require_writable(merged.folder)
    record_command(merged.folder)
    for source in sources:
        output.print(escape(merged_from(source, merged)))
    report_sweep(merged)


def merged_from(source: Sweep, merged: Sweep) -> str:
    """Copy every point's newest result; returns what was done in one line."""
    newest = {one.point: one for one in source.all_results()}  # in order: a later result replaces an earlier one
    copied = sum([merged.adopt(one) for one in newest.values()])
    failed = len(source.failures())
    left_out = f"; {failed} failed there and are left out" if failed else ""
    return f"{source.folder}: {copied} of {len(newest)} points copied, the others were here already{left_out}"


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="merge")
def main(cfg: DictConfig) -> None:
    """One merged sweep."""
    with refusing():
        merge(cfg)


if __name__ == "__main__":
    sys.argv[1:] = words_as_list(sys.argv[1:], "sweeps")
    run_application(main, "merge")
