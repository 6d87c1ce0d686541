"""What is on the screen while a point is measured."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bild_lab.lab import cli, point_progress
from bild_lab.lab.config import compose_config
from bild_lab.lab.point import prepare
from bild_lab.lab.point_progress import PointProgress, title_of


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal of 80 columns that keeps what it was sent."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(cli, "console", console)
    monkeypatch.setattr(point_progress, "console", console)
    return console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(point_progress.time, "perf_counter", lambda: now[0])
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
    assert stage.startswith("loading models") and sweep.startswith("sweep") and sweep.endswith("1/5")
    clock[0] = 7.0
    shown.stage("decoding")
    clock[0] = 17.0
    shown.advance()
    _, stage, sweep = lines(shown, screen)
    assert stage.startswith("decoding") and stage.endswith("1/4, 30 s left")
    assert sweep.endswith("1/5, 6 min left")  # 30 s and three points of 100 s
    shown.stage("scoring")
    assert lines(shown, screen)[1].startswith("scoring")


def test_the_first_point_of_a_sweep_is_the_measure_of_the_others(screen: Console, clock: list[float]) -> None:
    shown = PointProgress("1/3 vanilla", 2, place=1, points=3)
    clock[0] = 20.0
    shown.stage("decoding")
    clock[0] = 50.0
    shown.advance()
    assert lines(shown, screen)[2].endswith("0/3, 3 min left")  # 30 s of this point, and twice the 80 s that it takes


def test_a_title_names_place_drafter_and_the_knobs_that_were_given(checkpoints: Path, data: Path) -> None:
    words = [f"pair.target={checkpoints / 't5'}", f"pair.draft={checkpoints / 't5-draft'}"]
    words += ["dataset=multi30k", f"dataset.path={data}", "policy=bild", "policy.window=10", "policy.rollback=5"]
    point = prepare(compose_config(words))
    assert title_of(point, 2, 9, ["policy.window=10"]) == "2/9 bild, drafter t5-draft, rollback 5 window 10"
    assert title_of(point, 1, 1, []) == "bild, drafter t5-draft, rollback 5"  # the file's window is 10
    alone = prepare(compose_config([*words[:4], "policy=vanilla"]))
    assert title_of(alone, 1, 1, []) == "vanilla"
