"""Every command that added to a sweep is kept, once, as it can be typed again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bild_lab.lab.results.progress import COMMANDS, read_commands, record_command


def given(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", list(words))
    record_command(folder)


def test_commands_are_kept_in_order_and_a_repeated_one_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "first"
    given(monkeypatch, folder, "run.py", "-m", "policy.fallback=0.3,0.5")
    given(monkeypatch, folder, str(tmp_path / "scripts" / "sweeps.py"), "merge", "name=first", "outputs/a b")
    given(monkeypatch, folder, "run.py", "-m", "policy.fallback=0.3,0.5")
    assert [one.line for one in read_commands(folder)] == [
        "python run.py -m policy.fallback=0.3,0.5",
        "python scripts/sweeps.py merge name=first 'outputs/a b'",
    ]


def test_a_line_that_was_cut_short_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, tmp_path, "run.py")
    with (tmp_path / COMMANDS).open("a") as file:
        file.write('{"started": "2026-\n')
    given(monkeypatch, tmp_path, "run.py", "policy=bild")
    assert len(read_commands(tmp_path)) == 2


def test_a_folder_without_commands_has_none(tmp_path: Path) -> None:
    assert read_commands(tmp_path) == []
