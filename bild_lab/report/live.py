"""The report of a sweep that is still running, rewritten between its points."""

from __future__ import annotations

import math
import time

from bild_lab.lab.cli import console, escape
from bild_lab.lab.results.commands import PointsDone
from bild_lab.lab.results.records import Sweep

SHARE = 0.02  # of the time since the page was last written, at most, that writing it may take


class LiveReport:
    """Rewrites `report.html` when called, unless that would take too much of the sweep's time.

    It runs between points, never while one is timed. A sweep of short points gets its page less often.
    """

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._written_s = -math.inf

    def __call__(self, sweep: Sweep, progress: PointsDone) -> None:
        """Write the page if it is due. A fault is told and does not end the sweep: the last report is still to come."""
        begin = time.perf_counter()
        if self._cost_s > SHARE * (begin - self._written_s):
            return
        try:
            self._write(sweep, progress)
        except Exception as error:  # whatever a damaged result or a full disk raises
            console.print(f"the report between points could not be written: {escape(str(error))}")
        self._written_s = time.perf_counter()
        self._cost_s = self._written_s - begin

    def _write(self, sweep: Sweep, progress: PointsDone) -> None:
        from bild_lab.report.page.html import write_html  # takes a second to import

        with sweep.report_lock():
            results = sweep.results()
            write_html(
                sweep.name, results, sweep.failures(), sweep.folder / "report.html", sweep.older(), progress=progress
            )
