"""How far a sweep is, on the screen too; and the commands that added to it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf
from rich.console import Console

from bild_lab.lab import sweep as sweeps
from bild_lab.lab.config import console as console_module
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.store import progress
from bild_lab.lab.store.commands import COMMANDS, read_commands, record_command
from bild_lab.lab.store.progress import PointProgress, begin_progress, command_progress
from bild_lab.lab.store.records import Sweep
from bild_lab.lab.sweep import title_of


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal of 80 columns that keeps what it was sent."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(console_module, "console", console)
    monkeypatch.setattr(progress, "console", console)
    return console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def lines(shown: PointProgress, console: Console) -> list[str]:
    """What stands on the screen now."""
    with console.capture() as captured:
        console.print(shown._live.renderable)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_stage_examples_sweep_and_time_left_are_shown(screen: Console, clock: list[float]) -> None:
    shown = PointProgress("2/5 bild, drafter t5-tiny", 4, place=2, points=5, typical_s=100.0)
    shown.stage("loading models")
    title, stage, sweep = lines(shown, screen)
    assert title == "2/5 bild, drafter t5-tiny"
    assert (
        stage.startswith("loading models") and sweep.startswith("sweep") and sweep.endswith("1/5")
    )
    clock[0] = 7.0
    shown.stage("decoding")
    clock[0] = 17.0
    shown.advance(0.25)
    shown.advance(0.75)  # a text is counted when it is complete
    _, stage, sweep = lines(shown, screen)
    assert stage.startswith("decoding") and stage.endswith("1/4, 30 s left")
    assert sweep.endswith("1/5, 6 min left")  # 30 s and three points of 100 s
    shown.stage("scoring")
    assert lines(shown, screen)[1].startswith("scoring")


def test_the_first_point_of_a_sweep_is_the_measure_of_the_others(
    screen: Console, clock: list[float]
) -> None:
    shown = PointProgress("1/3 vanilla", 2, place=1, points=3)
    clock[0] = 20.0
    shown.stage("decoding")
    clock[0] = 50.0
    shown.advance(1)
    # 30 s of this point, and twice the 80 s that it takes
    assert lines(shown, screen)[2].endswith("0/3, 3 min left")


def test_a_pipe_has_a_line_for_a_point_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(progress, "console", piped)
    with PointProgress("1/3 bild, window [2]", 20):
        assert piped.file.getvalue() == "1/3 bild, window [2]: 20 texts …\n"


def test_a_log_file_gets_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    piped = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(progress, "console", piped)
    with PointProgress("1/3 bild", 20, place=1, points=3) as shown:
        clock[0] = 50.0
        shown.stage("decoding")
        for second in range(51, 172):
            clock[0] = second
            shown.advance(0.05)
    said = [
        "1/3 bild: 0/20, 7 min left; of the sweep 22 min left",
        "1/3 bild: 3/20, 6 min left; of the sweep 21 min left",
    ]
    assert piped.file.getvalue().splitlines()[1:] == said


def test_a_stage_that_lasts_is_told_in_a_file_and_a_short_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[Alarm] = []

    class Alarm:
        def __init__(
            self, seconds: float, function: Callable[..., None], arguments: list[str]
        ) -> None:
            self.seconds, self.ring = seconds, partial(function, *arguments)

        def start(self) -> None:
            waiting.append(self)

        def cancel(self) -> None:
            waiting.remove(self)

    piped = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(console_module, "Timer", Alarm)
    for module in (console_module, progress):
        monkeypatch.setattr(module, "console", piped)
    console_module.status_line.enter("reading the configuration")
    console_module.status_line.enter("loading PyTorch")
    (alarm,) = waiting  # of the stage that goes on
    assert 1 <= alarm.seconds <= 5 and piped.file.getvalue() == ""
    alarm.ring()
    with PointProgress("1/3 bild", 20, points=3) as shown:
        assert waiting == []
        for stage in ("loading models", "loading large, 3.1 GB", "decoding"):
            shown.stage(stage)
            (alarm,) = waiting
            if stage != "loading models":
                alarm.ring()
        shown.advance(1)
        assert waiting == []
        shown.stage("scoring")
    assert waiting == []
    said = [
        "loading PyTorch …",
        "1/3 bild: 20 texts …",
        "1/3 bild: loading large, 3.1 GB …",
        "1/3 bild: decoding …",
    ]
    assert piped.file.getvalue().splitlines() == said


def test_a_title_names_place_drafter_and_the_knobs_that_were_given(
    checkpoints: Path, data: Path
) -> None:
    words = [f"pair.target={checkpoints / 't5'}", f"pair.draft={checkpoints / 't5-draft'}"]
    words += [
        "dataset=multi30k",
        f"dataset.path={data}",
        "policy=bild",
        "policy.window=10",
        "policy.rollback=5",
    ]
    point = prepare(compose_config(words))
    assert (
        title_of(point, 2, 9, ["policy.window=10"])
        == "2/9 bild, drafter t5-draft, rollback 5 window 10"
    )
    # the file's window is 10
    assert title_of(point, 1, 1, []) == "bild, drafter t5-draft, rollback 5"
    alone = prepare(compose_config([*words[:4], "policy=vanilla"]))
    assert title_of(alone, 1, 1, []) == "vanilla"


def test_a_running_command_says_how_far_it_is() -> None:
    for _ in range(2):
        begin_progress(9)
        found = command_progress()
        assert found.typical_s is None
        found.advance(2.0)
        found.advance(None)  # finished before
        found.advance(4.0)
        assert (str(found), found.typical_s) == ("3 of 9 points", 3.0)


def given(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", list(words))
    record_command(folder)


def test_commands_are_kept_in_order_and_a_repeated_one_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "first"
    given(monkeypatch, folder, "run.py", "-m", "policy.fallback=0.3,0.5")
    given(
        monkeypatch,
        folder,
        str(tmp_path / "scripts" / "sweeps.py"),
        "merge",
        "name=first",
        "outputs/a b",
    )
    given(monkeypatch, folder, "run.py", "-m", "policy.fallback=0.3,0.5")
    assert [one.line for one in read_commands(folder)] == [
        "python run.py -m policy.fallback=0.3,0.5",
        "python scripts/sweeps.py merge name=first 'outputs/a b'",
    ]


def test_a_line_that_was_cut_short_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_commands(tmp_path) == []
    given(monkeypatch, tmp_path, "run.py")
    with (tmp_path / COMMANDS).open("a") as file:
        file.write('{"started": "2026-\n')
    given(monkeypatch, tmp_path, "run.py", "policy=bild")
    assert len(read_commands(tmp_path)) == 2


@pytest.mark.parametrize("rest", [b'{"started": "2026-', b'{"line": "python run.py name=\xc3'])
def test_a_command_after_a_line_that_was_cut_short_is_kept(
    rest: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a killed process or a full disk leaves a line without its end, also within a letter,
    and the next command joins it.
    """
    given(monkeypatch, tmp_path, "run.py")
    with (tmp_path / COMMANDS).open("ab") as file:
        file.write(rest)
    for _ in range(2):
        given(monkeypatch, tmp_path, "run.py", "policy=bild")
        lines = [one.line for one in read_commands(tmp_path)]
        assert lines == ["python run.py", "python run.py policy=bild"]


def test_reports_between_points_take_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, written, config = [100.0], [], OmegaConf.create({"name": "tested"})
    monkeypatch.setattr(sweeps, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    begin_progress(200)

    def live(sweep: Sweep, how_far: str) -> None:
        written.append(how_far)
        now_s[0] += 2.0

    callback = sweeps.SweepCallback(lambda sweep: None, live)
    for _ in range(200):  # a point in two seconds
        now_s[0] += 2.0
        command_progress().advance(2.0)
        callback.on_job_end(config, JobReturn())
    assert written[0] == "1 of 200 points" and 3 <= len(written) <= 1 + 400 * sweeps.LIVE_SHARE / 2
