"""The Hydra callback of `python run.py`: runs a sweep and reports what it found."""

from __future__ import annotations

from hydra.experimental.callback import Callback

from bild_lab.lab.cli import stages


def reported_sweep() -> Callback:
    """A callback that writes the table, figure and report of a sweep when it ends, however it ends."""
    stages.enter("loading PyTorch")
    from bild_lab.lab.sweep import SweepCallback  # late: torch takes seconds to load
    from bild_lab.report.sweep import LiveReport, report_sweep

    return SweepCallback(report_sweep, LiveReport())
