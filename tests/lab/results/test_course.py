"""How far a sweep's command came, as another process sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bild_lab.lab.results.course import COURSE, Course, RunningCourse, read_course


def test_a_running_command_tells_its_points(tmp_path: Path) -> None:
    course = RunningCourse(tmp_path, 9)
    assert read_course(tmp_path) == (Course(9, 0), True)
    course.advance()
    found, runs = read_course(tmp_path)
    assert (found.told, runs) == ("1 of 9 points", True)
    course.stop(ended=False)
    assert read_course(tmp_path) == (Course(9, 1), False)


def test_one_that_ended_does_not_run(tmp_path: Path) -> None:
    course = RunningCourse(tmp_path, 1)
    course.advance()
    course.stop(ended=True)
    assert read_course(tmp_path) == (Course(1, 1, ended=True), False)
    assert Course(1, 1).told == "1 of 1 point"


def test_a_search_does_not_know_how_many_points_it_will_have(tmp_path: Path) -> None:
    course = RunningCourse(tmp_path, None)
    course.advance()
    assert course.told == read_course(tmp_path)[0].told == "1 point so far"
    course.stop(ended=True)
    assert Course(None, 3).told == "3 points so far"


def test_points_of_other_processes_are_not_counted(tmp_path: Path) -> None:
    course = RunningCourse(tmp_path, 9, counts=False)
    course.advance()
    assert read_course(tmp_path)[0].told == "9 points"
    course.stop(ended=False)


def test_a_killed_command_does_not_run_any_more(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from bild_lab.lab.results.course import RunningCourse; "
        "course = RunningCourse(Path(sys.argv[1]), 9); course.advance(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == -9
    assert read_course(tmp_path) == (Course(9, 1), False)


@pytest.mark.parametrize("content", ["", "[]", '{"total": "nine"}', None])
def test_without_a_readable_course_nothing_is_known(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / COURSE).write_text(content)
    assert read_course(tmp_path) is None


def test_a_folder_that_cannot_be_written_stops_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    course = RunningCourse(tmp_path / "file", 9)
    course.advance()
    course.stop(ended=True)
