"""What all commands share: words that are wanted, what is said when they are stopped, streams that
are not UTF-8.
"""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.lab.config.compose import config_dir
from bild_lab.lab.config.console import output, tolerate_streams
from bild_lab.lab.config.entrypoint import BAD_INPUT, INTERRUPTED, POINTS_KEPT, run_application
from scripts import compare


@pytest.mark.parametrize("command", ["bench", "screen", "match_rates", "generate_calibration"])
def test_a_command_that_takes_long_does_nothing_without_a_word(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"scripts/{command}.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(config_dir().parent / "scripts" / f"{command}.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert (
        ended.value.code == BAD_INPUT
        and "needed; python scripts/" in said
        and "got no word" in said
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", ["artifact", "bench", "compare", "figures", "paper_run", "sweeps", "wandb_report"]
)
def test_a_command_with_words_of_its_own_reads_them(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"scripts/{command}.py", "first_word", "second_word"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(config_dir().parent / "scripts" / f"{command}.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert (
        ended.value.code == BAD_INPUT
        and "first_word" in said
        and "KEY=VALUE, such as policy=bild" not in said
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("margin=-1", "margin must be a finite number > 0, got -1"),
        (
            "++margn=5",
            "adds a key that no value refers to, so it changes nothing; did you mean margin?",
        ),
        ("hydra/launcher=gpus", "hydra/launcher=gpus would change nothing, as this command is one"),
    ],
)
def test_a_refused_command_leaves_the_working_directory(
    word: str, said: str, command: Callable[..., tuple[int, str]]
) -> None:
    """Fault: it is the folder of this command's results, and empty, and is removed like another."""
    code, printed = command(compare, "sweeps=[a,b]", word, config="compare")
    assert code == BAD_INPUT and said in " ".join(printed.split())
    assert Path.cwd().is_dir()


def test_who_stops_a_command_reads_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["any.py"])
    for kept in ("nothing was written", POINTS_KEPT):
        with pytest.raises(SystemExit) as ended:
            run_application(stopped, None, stop_notice=kept)
        said = capsys.readouterr().err
        assert ended.value.code == INTERRUPTED and f"stopped; {kept}" in said.replace("\n", " ")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf8_gets_replacements(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    tolerate_streams()
    output.print("fallback 0.5 → 1.98× …")
    sys.stdout.flush()
    assert written.getvalue().decode(encoding).strip() == {"ascii": "fallback 0.5 ? 1.98? ?"}.get(
        encoding, "fallback 0.5 ? 1.98× ?"
    )
