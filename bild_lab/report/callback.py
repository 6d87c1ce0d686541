"""The Hydra callback of `python run.py`: runs a sweep and reports what it found."""

from __future__ import annotations

from bild_lab.lab.sweep import SweepCallback
from bild_lab.report.live import LiveReport
from bild_lab.report.sweep import report_sweep


class ReportedSweep(SweepCallback):
    """Writes the table, figure and report of a sweep when it ends, however it ends, and the report between points."""

    def __init__(self) -> None:
        super().__init__(report_sweep, LiveReport())
