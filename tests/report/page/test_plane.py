"""The screened plane in the report: its numbers, and its confirmed points are those of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bild_lab.lab.screening.rows import Row, write_rows
from bild_lab.report.page.html import write_html
from bild_lab.report.page.plane import planes, screened_policies
from bild_lab.report.style import marks
from tests.report.sample import sample_sweep


def row(policy: str = "bild", place: int = 0, **knobs: object) -> Row:
    return Row(
        policy=policy,
        knobs=knobs,
        split="validation",
        n_examples=7,
        quality=40.0 + place,
        quality_low=39.0,
        quality_high=42.0,
        quality_difference=float(place),
        predicted_speedup=2.0 - place / 10,
        tokens_per_target_call=2.5,
        target_calls=10 + place,
        draft_calls=30,
        acceptance_rate=None if policy == "vanilla" else 0.75,
        quality_metric="BLEU",
        quality_difference_low=-1.0,
        quality_difference_high=1.0,
        tokens=25,
        drafted=30,
        accepted=15,
        fallbacks=4,
        rollbacks=3,
    )


ROWS = [
    row(place=0, fallback=0.3, rollback=10.0),
    row(place=1, fallback=0.3, rollback=2),
    row(place=2, fallback=0.05, rollback=2),
    row("speculative", place=-1, window=5),
]


def test_points_that_nothing_was_timed_for_are_no_plane(tmp_path: Path) -> None:
    write_rows(tmp_path, [replace(one, predicted_speedup=None) for one in ROWS])
    assert screened_policies(tmp_path) == [] and planes(tmp_path, [], {}) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    live = sample_sweep()[0].point
    write_rows(tmp_path, [replace(ROWS[0], confirmed=live), *ROWS[1:]])
    return tmp_path


def test_every_screened_point_has_its_knobs_and_numbers(folder: Path) -> None:
    [plane] = planes(folder, sample_sweep(), marks(screened_policies(folder)))
    knobs = {one["name"]: {knob["name"]: knob["values"] for knob in one["knobs"]} for one in plane["policies"]}
    assert knobs == {"bild": {"fallback": ["0.05", "0.3"], "rollback": ["2", "10"]}, "speculative": {"window": ["5"]}}
    assert [one["at"] for one in plane["points"]] == [[1, 1], [1, 0], [0, 0], [0]]
    assert [one["quality_difference"] for one in plane["points"]] == [0, 1, 2, -1]
    assert [one["target_calls"] for one in plane["points"]] == [10, 11, 12, 9]
    assert (plane["split"], plane["examples"], plane["metric"]) == ("validation", 7, "BLEU")


def test_a_confirmed_point_has_the_numbers_of_its_live_run(folder: Path) -> None:
    result = sample_sweep()[0]
    [plane] = planes(folder, sample_sweep(), marks(screened_policies(folder)))
    assert [one["live"] is not None for one in plane["points"]] == [True, False, False, False]
    live = plane["points"][0]["live"]
    assert live["speedup"] == [result.speedup.value, result.speedup.low, result.speedup.high]
    assert live["difference"][0] == result.quality.difference


def test_the_page_draws_a_plane_without_live_points(folder: Path) -> None:
    write_html("plane", [], [], folder / "report.html")
    page = (folder / "report.html").read_text()
    assert "The screened plane: 4 points on 7 examples of validation" in page


def test_without_a_table_there_is_no_plane(tmp_path: Path) -> None:
    assert planes(tmp_path, [], {}) == []
    write_html("first", sample_sweep(), [], tmp_path / "report.html")
    assert "The screened plane" not in (tmp_path / "report.html").read_text()
