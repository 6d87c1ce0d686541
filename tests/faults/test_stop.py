"""SIGINT and SIGTERM: the sweep ends at once, with a report of what is finished and a status that
says so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pandas as pd
import pytest

from bild_lab.report.page.index import read_runs
from tests.faults.conftest import PATIENCE_S, Ground, Started

SWEEP = ("-m", "policy=bild", "policy.fallback=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8")


def once(condition: Callable[[], bool], started: Started) -> None:
    """Wait until something is so; fails if the process ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert started.process.exitcode is None and time.monotonic() < deadline, started.printed
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_sweep_reports_what_is_finished(
    ground: Ground, number: signal.Signals, status: int
) -> None:
    sweep = ground.start(*SWEEP)
    once(lambda: len(ground.finished()) >= 1, sweep)
    os.kill(sweep.process.pid, number)
    assert sweep.ended() == status, sweep.printed
    assert "stopped" in sweep.printed and "Traceback" not in sweep.printed
    kept = ground.finished()
    assert 1 <= len(kept) < 8
    assert sorted(pd.read_csv(ground.sweep.folder / "sweep.csv")["point"]) == sorted(kept)
    assert (ground.sweep.folder / "report.html").is_file()
    assert list(ground.sweep.points.glob(".*")) == []
    (run,) = read_runs(ground.folder / "outputs")
    assert (
        run.points == len(kept) and run.name in (ground.folder / "outputs/index.html").read_text()
    )
    again = ground.start(*SWEEP)
    assert again.ended() == 0, again.printed
    ground.require_whole(8, kept)
    assert [one.points for one in read_runs(ground.folder / "outputs")] == [8]
