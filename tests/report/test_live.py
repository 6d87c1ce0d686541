"""The report between points: written where it costs little, with how far the sweep is, and no cause of failure."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bild_lab.lab.results.records import Sweep
from bild_lab.report import live
from bild_lab.report.live import SHARE, LiveReport
from bild_lab.report.page import html
from tests.report.sample import sample_result


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    result = sample_result("bild", {"fallback": 0.5}, 1.5)
    Sweep(tmp_path).write_point(result.point, "", result, [])
    return Sweep(tmp_path)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


def test_the_page_says_how_far_the_sweep_is_until_it_ends(sweep: Sweep) -> None:
    LiveReport()(sweep, "3 of 9 points")
    page = (sweep.folder / "report.html").read_text()
    assert "Still running: 3 of 9 points" in page
    assert '<body class="live">' in page


def test_writing_takes_a_small_share_of_the_time_at_most(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = Clock(), []
    monkeypatch.setattr(live, "time", clock)

    def write(*_: object, progress: str) -> None:
        written.append(progress)
        clock.now_s += 0.5

    monkeypatch.setattr(html, "write_html", write)
    report = LiveReport()
    for done in range(100):  # a point a second
        report(sweep, f"{done} of 100 points")
        clock.now_s += 1.0
    assert written[0] == "0 of 100 points" and 3 <= len(written) <= 1 + 100 * SHARE / 0.5


def test_a_fault_is_told_and_the_sweep_goes_on(sweep: Sweep, capfd: pytest.CaptureFixture[str]) -> None:
    (sweep.folder / "report.html").mkdir()
    LiveReport()(sweep, "1 of 2 points")
    assert "the report between points could not be written" in capfd.readouterr().err


def test_the_last_report_says_nothing_of_running(sweep: Sweep) -> None:
    from bild_lab.report.sweep import report_sweep

    LiveReport()(sweep, "1 of 2 points")
    begin = time.time()
    report_sweep(sweep)
    assert (sweep.folder / "report.html").stat().st_mtime >= begin - 1
    assert "Still running" not in (sweep.folder / "report.html").read_text()
