"""The lab book is written when a command ends."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.report.book import book
from bild_lab.report.book.after import in_lab_book, update

PAGE = Path("outputs/index.html")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("outputs/notes").mkdir(parents=True)


def test_it_is_written_at_the_end() -> None:
    with in_lab_book():
        assert not PAGE.exists()
    assert "notes" in PAGE.read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_it_is_written_when_the_command_is_stopped_or_fails(error: type[BaseException]) -> None:
    with pytest.raises(error), in_lab_book():
        raise error
    assert PAGE.exists()


def test_refused_input_writes_nothing() -> None:
    with pytest.raises(UserError), in_lab_book():
        raise UserError("no")
    assert not PAGE.exists()
    update(Path("nowhere"))
    assert not Path("nowhere").exists()


def test_only_the_first_of_several_processes_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    update()
    assert not PAGE.exists()


def test_a_book_that_cannot_be_written_is_told_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def full(outputs: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(book, "write_book", full)
    with in_lab_book():
        pass
    assert "the lab book was not written: OSError: [Errno 28] No space left" in capsys.readouterr().err


COMMANDS = [  # script, its configuration, and what it runs
    ("compare", "compare", "compare"),
    ("train_bita", "train_bita", "train"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("align", "align", "run"),
            ("build_ngrams", "ngrams", "build_table"),
            ("finetune", "finetune", "run"),
            ("fit_tree", "fit_tree", "fit"),
            ("generate_calibration", "calibration", "generate"),
            ("screen", "screen", "run"),
            ("train_judge", "train_judge", "train"),
            ("train_lm_heads", "train_lm_heads", "train"),
            ("train_medusa", "train_medusa", "train"),
        )
    ),
]


@pytest.mark.parametrize(("name", "config", "task"), COMMANDS)
def test_every_command_that_adds_a_folder_writes_it(
    command, name: str, config: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = import_module(f"scripts.{name}")
    monkeypatch.setattr(script, task, lambda cfg: Path("outputs/added").mkdir(parents=True))
    code, printed = command(script, config=config)
    assert code == 0, printed
    assert "added" in PAGE.read_text()


def test_figures_write_the_book_of_the_outputs_that_they_read(command, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import figures

    monkeypatch.setattr(figures, "draw", lambda wanted: [])
    Path("elsewhere/figures").mkdir(parents=True)
    code, printed = command(figures, "bild_fig4", "outputs=elsewhere")
    assert code == 0, printed
    assert Path("elsewhere/index.html").exists() and not PAGE.exists()
