"""The report of a sweep that is still running, rewritten between its points."""

from __future__ import annotations

import math
import time

from bild_lab.lab.cli import console, escape
from bild_lab.lab.results.records import Sweep

SHARE = 0.02  # of the time since the page was last written, at most, that writing it may take


class LiveReport:
    """Rewrites `report.html` when called, unless that would take too much of the sweep's time.

    It runs between points, never while one is timed. A sweep of short points gets its page less often.
    """

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._written_s = -math.inf

    def __call__(self, sweep: Sweep, progress: str) -> None:
        """Write the page, with how far the sweep is, if it is due.

        A fault is told and does not end the sweep: the last report is still to come.
        """
        if self._cost_s > SHARE * (time.perf_counter() - self._written_s):
            return
        from bild_lab.report.page import html  # imported once, which says nothing of what writing costs

        begin = time.perf_counter()
        try:
            with sweep.report_lock():
                results, path = sweep.results(), sweep.folder / "report.html"
                html.write_html(sweep.name, results, sweep.failures(), path, sweep.older(), progress=progress)
        except Exception as error:  # whatever a damaged result or a full disk raises
            console.print(f"the report between points could not be written: {escape(str(error))}")
        self._written_s = time.perf_counter()
        self._cost_s = self._written_s - begin
