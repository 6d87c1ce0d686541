"""`hydra/launcher=joblib`, `submitit_local`, and a Slurm of one node: workers' results, one report,
flagged timings.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import run
from tests.faults.conftest import PATIENCE_S, Ground

SCRIPT = Path(run.__file__)
SWEEP = ("-m", "policy=bild", "policy.fallback=0.2,0.4,0.6")
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
SUBMITIT = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10")
SLURM = (
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=tested",
    "hydra.launcher.cpus_per_task=1",
)
CLUSTER = Path(__file__).with_name("slurm.sh")

pytestmark = pytest.mark.slow


def started(ground: Ground, *words: str) -> subprocess.Popen[str]:
    """A process of its own with its own temporary folder, so that only its jobs are seen beside
    each other.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(SCRIPT.parent),
        "TMPDIR": str(ground.folder),
        "COLUMNS": "200",
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *ground.base, *words],
        cwd=ground.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def swept(ground: Ground, *words: str) -> tuple[int, str]:
    process = started(ground, *words)
    try:
        printed, _ = process.communicate(timeout=2 * PATIENCE_S)
    finally:
        process.kill()  # nothing where it has ended
    return process.returncode, printed


@pytest.mark.parametrize("launcher", [JOBLIB, SUBMITIT], ids=["joblib", "submitit_local"])
def test_jobs_at_once_make_one_report_whose_timings_are_flagged(
    launcher: tuple[str, ...], ground: Ground
) -> None:
    code, printed = swept(ground, *SWEEP, *launcher)
    assert code == 0, printed
    ground.require_whole(3, {})
    shared = [
        json.loads(content)["environment"]["shared_device"]
        for content in ground.finished().values()
    ]
    assert any(shared), "three jobs, and no two of them met"
    assert "timed beside other jobs on the same device" in printed
    assert "timed beside other jobs" in (ground.sweep.folder / "report.html").read_text()


def test_a_signal_ends_the_workers_too_and_reports(ground: Ground) -> None:
    fallbacks = ",".join(str(number / 100) for number in range(10, 70))
    process = started(ground, "-m", "policy=bild", f"policy.fallback={fallbacks}", *JOBLIB)
    deadline = time.monotonic() + PATIENCE_S
    while len(ground.finished()) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143, printed
    assert "stopped" in printed and (ground.sweep.folder / "report.html").is_file()
    left = len(ground.finished())
    time.sleep(3)
    assert 2 <= left < 60 and len(ground.finished()) == left  # nobody is measuring any more


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One node, found by Slurm's commands of this test."""
    if os.getuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("there is no Slurm: apt install slurm-wlm munge, as root")
    subprocess.run([CLUSTER, "start", tmp_path / "slurm"], check=True, timeout=60)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm/slurm.conf"))
    yield
    subprocess.run([CLUSTER, "stop", tmp_path / "slurm"], check=True, timeout=60)


def test_a_sweep_on_slurm_that_was_killed_with_its_jobs_goes_on(
    slurm: None, ground: Ground
) -> None:
    words = (
        "-m",
        "policy=bild",
        "policy.fallback=0.2,0.3,0.4,0.5",
        "hydra.launcher.timeout_min=10",
        *SLURM,
    )
    process = started(ground, *words, "hydra.launcher.array_parallelism=1")
    deadline = time.monotonic() + PATIENCE_S
    while len(ground.finished()) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    subprocess.run(["scancel", "--user=root", "--signal=KILL", "--full"], check=False)
    subprocess.run(["scancel", "--user=root"], check=True)
    printed, before = process.communicate()[0], ground.finished()
    assert 2 <= len(before) < 4, printed
    code, printed = swept(ground, *words)
    assert code == 0, printed
    ground.require_whole(4, before)
    # a job for each point
    assert len([*(ground.sweep.folder / ".submitit").rglob("*_log.out")]) >= 4 + len(before)
