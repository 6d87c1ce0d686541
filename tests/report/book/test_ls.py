"""`python scripts/ls.py` as a user meets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import ls
from tests.report.book.folders import write_outputs

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def outputs(command: Command) -> Path:
    folder = Path("outputs")
    folder.mkdir()
    write_outputs(folder)
    return folder


def test_it_lists_kinds_apart_with_state_date_and_size_and_writes_the_page(command: Command, outputs: Path) -> None:
    code, printed = command(ls)
    assert code == 0
    lines = printed.splitlines()
    titles = ["Sweeps (2)", "Screenings and searches (1)", "Trainings (2)", "Comparisons (1)", "Figures (2)"]
    assert [line for line in lines if line in titles] == titles
    (bita,) = [line for line in lines if line.startswith("bita ")]
    assert "finished 2026-11-20 " in bita and bita.endswith(" bytes")
    assert "interrupted, 3 of 9 points" in printed and "BiTA adapter: 400 steps" in printed
    assert "outputs/index.html shows them with pictures" in lines
    assert "half" in (outputs / "index.html").read_text()


@pytest.mark.parametrize("columns", [80, 120])
def test_its_lines_fit_the_terminal(
    command: Command, outputs: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    (outputs / ("a_very_long_name_" * 8)).mkdir()
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = command(ls)[1]
    assert max(map(len, printed.splitlines())) <= columns


def test_words_choose(command: Command, outputs: Path) -> None:
    printed = command(ls, "interrupted", "training")[1]
    assert "half" in printed and "bita" not in printed and "Sweeps" not in printed
    assert "1 of 13 contain interrupted training" in printed


def test_a_page_that_cannot_be_written_is_told_and_the_list_printed(
    command: Command, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outputs / "index.html").mkdir()
    code, printed = command(ls)
    assert code == 0 and "bita" in printed and "outputs/index.html was not written: " in printed


def test_bad_input_and_help_write_nothing(command: Command) -> None:
    code, printed = command(ls, "--outputs", "nowhere")
    assert (code, printed.count("\n")) == (2, 1) and "nowhere is no folder" in printed
    code, printed = command(ls, "--help")
    assert code == 0 and printed.startswith("usage: ls.py")
    assert not Path("outputs").exists()
