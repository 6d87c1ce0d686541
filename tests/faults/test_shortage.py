"""A full disk, a clock that is set back: none that was finished is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.child import ClockSetBack, FillDisk, fill
from tests.faults.conftest import Ground

pytestmark = pytest.mark.slow
SWEEP = ("-m", "policy=bild", "policy.fallback=0.2,0.6", "policy.rollback=1,5")


@pytest.fixture
def small_disk(ground: Ground) -> Iterator[Ground]:
    """The ground on a disk of 12 MB, of which a report takes 5."""
    mount = ground.folder / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(mount)]
    if (
        os.geteuid() != 0
        or subprocess.run(command, check=False, capture_output=True).returncode != 0
    ):
        pytest.skip("mounting a small disk needs root")
    yield replace(ground, folder=mount)
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_disk_that_fills_costs_the_points_that_no_longer_fit(small_disk: Ground) -> None:
    filler: Path = small_disk.folder / "filler"
    full = small_disk.start(*SWEEP, fault=FillDisk(filler, nth=2))
    assert full.ended() == 1
    kept = small_disk.finished()
    assert len(kept) == 1
    assert list(small_disk.sweep.points.glob(".*")) == []  # no half-written rest takes room
    filler.unlink()
    assert "nothing can be stored in" in full.printed
    again = small_disk.start(*SWEEP)
    assert again.ended() == 0, again.printed
    small_disk.require_whole(4, kept)


def test_a_full_disk_is_refused_before_anything_is_measured(small_disk: Ground) -> None:
    filler = small_disk.folder / "filler"
    log = small_disk.folder / "log-0"
    log.touch()
    fill(filler)
    with filler.open("r+b") as stream:
        stream.truncate(filler.stat().st_size - 200_000)  # room for a message, not for results
    started = small_disk.start(*SWEEP)
    assert started.ended() == 2
    assert "whose disk is full" in started.printed
    assert not (small_disk.folder / "outputs").exists()


def test_a_clock_that_is_set_back_changes_neither_order_nor_durations(ground: Ground) -> None:
    words = ("policy=bild", "policy.fallback=0.2")
    assert ground.start(*words).ended() == 0
    (before,) = ground.finished()
    jumped = ground.start(*words, "resume=false", fault=ClockSetBack(400))
    assert jumped.ended() == 0, jumped.printed
    assert ground.start(*words, "resume=false").ended() == 0  # and back again
    measured = ground.sweep.all_results()
    assert [one.folder.name for one in measured] == [before, f"{before}.2", f"{before}.3"]
    assert all(0 <= one.total_s < 86_400 for one in measured)
    assert (
        "2 older measurements of these points are kept"
        in (ground.sweep.folder / "report.html").read_text()
    )
