"""The report of a sweep: its files at the end, and its page between points."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.config.schemas import ReportSpec, typed
from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.records import Sweep
from bild_lab.report.page import html
from bild_lab.report.sweep import live_report, report_sweep
from tests.report.sample import sample_example, sample_failure, sample_result


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    result = sample_result("bild", {"fallback": 0.5}, 1.5)
    Sweep(tmp_path / "first").write_point(result.point, "", result, [])
    return Sweep(tmp_path / "first")


@pytest.mark.slow
def test_the_page_says_how_far_the_sweep_is_until_it_ends(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    live_report(sweep, "3 of 9 points")
    page = (sweep.folder / "report.html").read_text()
    assert "Still running: 3 of 9 points" in page and '<body class="live">' in page
    begin = time.time()
    report_sweep(sweep)
    assert (sweep.folder / "report.html").stat().st_mtime >= begin - 1
    assert "Still running" not in (sweep.folder / "report.html").read_text()
    names = {file.name for file in sweep.folder.iterdir() if not file.name.startswith(".")}
    assert names == {"points", "sweep.csv", "pareto.png", "pareto.pdf", "report.html"}
    assert (
        '<a href="first/report.html">first</a>' in (sweep.folder.parent / "index.html").read_text()
    )
    assert "bild (fallback 0.5) decodes 1.50×" in " ".join(capsys.readouterr().out.split())


@pytest.mark.fast('{"id": "a"')
@pytest.mark.parametrize("content", [None, "{}", '{"id": "a"', "[1]", "\0\0"])
def test_a_point_whose_texts_are_lost_is_named_and_everything_else_reported(
    content: str | None, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    other = sample_result("bild", {"fallback": 0.9}, 1.2)
    file = sweep.write_point(other.point, "", other, [sample_example("a")]) / "examples.jsonl"
    file.unlink() if content is None else file.write_text(content)
    report_sweep(sweep)
    printed = " ".join(capsys.readouterr().out.split())
    named = f"The texts of bild (fallback 0.9) are not shown: {file} cannot be read"
    assert "bild (fallback 0.5) decodes 1.50×" in printed and named in printed
    page = (sweep.folder / "report.html").read_text()
    assert (
        "fallback 0.9" in page
        and named in page
        and len(pd.read_csv(sweep.folder / "sweep.csv")) == 2
    )


def test_of_a_large_certified_sweep_the_texts_of_the_shown_points_alone_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: every text of a thousand lossy points, with its rounds, is in memory at once."""
    sweep, read = Sweep(tmp_path / "certified"), []
    monkeypatch.setattr(html, "read_examples", lambda folder: read.append(folder) or [])
    drawn = []
    monkeypatch.setattr(html.figures, "divergence_figure", drawn.append)
    defect = {"verdict": "defect", "position": 3, "margin": 0.5, "gap": 0.5}
    for number in range(30):
        point = sample_result(
            "bild",
            {"fallback": number},
            1.2 + number / 100,
            number - 30.0,
            certificate={"equal": 99, "ties": 0, "defects": 1, "claimed": False},
        )
        sweep.write_point(point.point, "", point, [sample_example("a", certificate=defect)])
    html.write_html("certified", sweep.results(), [], sweep.folder / "report.html")
    (group,) = by_setting(sweep.results())
    assert read == [result.folder for result in group.selected()] and len(read) < 30
    assert drawn == [[defect] * 30]  # of all


def test_a_sweep_whose_points_all_failed_names_the_files_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Sweep(tmp_path / "failed")
    failed.write_failure(sample_failure("no memory"), "")
    report_sweep(failed)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"the rest is in {failed.folder}: report.html" in printed and "pareto.png" not in printed


def test_the_report_draws_the_figures_that_were_asked_for(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    report_sweep(sweep, ["svg"])
    assert [file.name for file in sweep.folder.glob("pareto.*")] == ["pareto.svg"]
    assert "report.html, pareto.svg, sweep.csv" in " ".join(capsys.readouterr().out.split())


def test_other_kinds_of_figures_are_refused() -> None:
    for figures in (["gif"], []):
        with pytest.raises(
            UserError, match=r"figures are png, pdf, svg, one or more of them, got \["
        ):
            typed(ReportSpec, compose_config([f"report.figures={figures}"]).report, "report")


def test_a_fault_is_printed_and_the_sweep_goes_on(
    sweep: Sweep, capfd: pytest.CaptureFixture[str]
) -> None:
    (sweep.folder / "report.html").mkdir()
    live_report(sweep, "1 of 2 points")
    assert "the report between points could not be written" in capfd.readouterr().err


def test_pictures_of_earlier_commands_are_drawn_anew(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        "bild_lab.report.pareto_figure.draw_pareto", lambda *words: drawn.append(list(words[2]))
    )
    report_sweep(sweep, ["svg"])
    for kind in ("png", "txt"):
        (sweep.folder / f"pareto.{kind}").write_text("of another command")
    report_sweep(sweep, ["svg"])
    assert drawn == [["svg"], ["svg", "png"]]
