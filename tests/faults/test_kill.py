"""kill -9, wherever it strikes, and two sweeps at once: what was finished stays, and the same
command runs the rest.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.child import KillAfter, KillAtCall, KillHalfWritten
from tests.faults.conftest import Ground

SWEEP = ("-m", "policy=bild", "policy.fallback=0.2,0.6", "policy.rollback=1,5")

pytestmark = pytest.mark.slow


def killed_and_resumed(ground: Ground, fault: Callable[[], None]) -> int:
    """Sweep with the fault, then without; returns how many points the fault left finished."""
    assert ground.start(*SWEEP, fault=fault).ended() == -signal.SIGKILL
    kept = ground.finished()
    again = ground.start(*SWEEP)
    assert again.ended() == 0, again.printed
    assert again.printed.count("finished before") == len(kept)
    ground.require_whole(4, kept)
    return len(kept)


def test_a_sweep_killed_in_the_write_of_its_second_point_loses_that_point_alone(
    ground: Ground,
) -> None:
    assert killed_and_resumed(ground, KillHalfWritten("result.json", nth=2)) == 1
    # what the killed write left, which nobody reads
    assert len(list(ground.sweep.points.glob(".*"))) == 1


@pytest.mark.parametrize(("after", "finished"), [(False, 1), (True, 2)])
def test_publishing_a_point_is_one_step(ground: Ground, after: bool, finished: int) -> None:
    assert killed_and_resumed(ground, KillAtCall("rename", after, nth=2)) == finished


@pytest.mark.parametrize(("target", "after"), [("sweep.csv", False), ("pareto.png", True)])
def test_a_sweep_killed_in_its_report_has_all_points(
    ground: Ground, target: str, after: bool
) -> None:
    assert killed_and_resumed(ground, KillAtCall("replace", after, target=target)) == 4


@pytest.mark.parametrize("seconds", [0.8, 2.5])
def test_a_sweep_killed_at_any_moment_resumes(ground: Ground, seconds: float) -> None:
    ground.start(*SWEEP, fault=KillAfter(seconds)).ended()  # 0 if it was faster
    kept = ground.finished()
    again = ground.start(*SWEEP)
    assert again.ended() == 0, again.printed
    ground.require_whole(4, kept)


def test_two_sweeps_at_once_share_a_folder(ground: Ground) -> None:
    one = ground.start("-m", "policy=bild", "policy.fallback=0.2,0.4,0.6")
    other = ground.start("-m", "policy=bild", "policy.fallback=0.2,0.5,0.6")
    most = 0
    while one.process.is_alive() or other.process.is_alive():
        assert ground.sweep.failures() == []  # a half-read file would be among them
        seen = len(ground.sweep.results())
        assert seen >= most
        most = seen
    assert (one.ended(), other.ended()) == (0, 0), one.printed + other.printed
    ground.require_whole(4, {})
