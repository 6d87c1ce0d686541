"""kill -9, wherever it strikes: what was finished stays, and the same command runs the rest."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import pytest

from tests.faults.child import KillAfter, KillAtCall, KillHalfWritten
from tests.faults.conftest import Ground
from tests.faults.trials import trials

SWEEP = ("-m", "policy=bild", "policy.fallback=0.2,0.6", "policy.rollback=1,5")
Note = Callable[..., None]


def killed_and_resumed(ground: Ground, fault: Callable[[], None]) -> int:
    """Sweep with the fault, then without; returns how many points the fault left finished."""
    assert ground.start(*SWEEP, fault=fault).ended() == -signal.SIGKILL
    kept = ground.finished()
    again = ground.start(*SWEEP)
    assert again.ended() == 0, again.printed
    assert again.printed.count("finished before") == len(kept)
    ground.require_whole(4, kept)
    return len(kept)


@pytest.mark.slow
def test_a_sweep_killed_in_the_write_of_its_second_point_loses_that_point_alone(ground: Ground, note: Note) -> None:
    assert killed_and_resumed(ground, KillHalfWritten("result.json", nth=2)) == 1
    assert len(list(ground.sweep.points.glob(".*"))) == 1  # what the killed write left, which nobody reads
    note("kill -9, result half written", "killed; resumed", 1)


@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(3))
@pytest.mark.parametrize("file", ["config.yaml", "examples.jsonl", "result.json"])
def test_a_file_half_written_is_never_taken_for_a_result(ground: Ground, note: Note, file: str, trial: int) -> None:
    nth = 1 + trial % 4
    assert killed_and_resumed(ground, KillHalfWritten(file, nth)) == nth - 1
    note("kill -9, result half written", "killed; resumed", nth - 1)


@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(2))
@pytest.mark.parametrize("after", [False, True])
def test_publishing_a_point_is_one_step(ground: Ground, note: Note, after: bool, trial: int) -> None:
    nth = 1 + trial % 4
    finished = killed_and_resumed(ground, KillAtCall("rename", after, nth))
    assert finished == (nth if after else nth - 1)
    note("kill -9, around the publishing step", "killed; resumed", finished)


@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(6))
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("target", ["sweep.csv", "pareto.png", "report.html"])
def test_a_sweep_killed_in_its_report_has_all_points(
    ground: Ground, note: Note, target: str, after: bool, trial: int
) -> None:
    assert killed_and_resumed(ground, KillAtCall("replace", after, target=target)) == 4
    note("kill -9, in report writing", "killed; resumed", 4)


@pytest.mark.slow
@pytest.mark.parametrize("trial", trials())
def test_a_sweep_killed_at_any_moment_resumes(ground: Ground, note: Note, trial: int) -> None:
    seconds = random.Random(trial).uniform(0.5, 5)
    first = ground.start(*SWEEP, fault=KillAfter(seconds))
    if first.ended() == 0:  # it was faster
        ground.require_whole(4, {})
        return
    kept = ground.finished()
    again = ground.start(*SWEEP)
    assert again.ended() == 0, again.printed
    ground.require_whole(4, kept)
    note("kill -9, at a random moment", "killed; resumed", len(kept))
