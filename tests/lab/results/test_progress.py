"""How far a sweep's command is, as another process sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.lab.results.progress import PROGRESS, Progress, advance, begin, read_progress


def test_a_running_command_says_how_far_it_is(tmp_path: Path) -> None:
    begin(tmp_path, 9)
    advance(tmp_path, 2.0)
    advance(tmp_path, None)  # finished before
    advance(tmp_path, 4.0)
    found = read_progress(tmp_path)
    assert (str(found), found.typical_s) == ("3 of 9 points", 3.0)


@pytest.mark.parametrize("content", ["", "[]", '{"nine": 9}', None])
def test_without_a_readable_file_nothing_is_known(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / PROGRESS).write_text(content)
    assert read_progress(tmp_path) is None
    advance(tmp_path / "file", 1.0)  # stops no sweep


def test_a_folder_that_cannot_be_written_stops_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    Progress(9).write(tmp_path / "file")
