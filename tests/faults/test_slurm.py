"""`hydra/launcher=submitit_slurm` on one node of a real Slurm: a sweep that is killed with its jobs, and resumed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import run
from tests.faults.conftest import PATIENCE_S, Ground

ROOT = Path(run.__file__).parent
NEEDED = ("slurmctld", "slurmd", "munged")
SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=tested", "hydra.launcher.cpus_per_task=1")
SLURM += ("hydra.launcher.timeout_min=10",)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.getuid() != 0 or not all(map(shutil.which, NEEDED)), reason="no Slurm: apt install slurm-wlm munge, as root"
    ),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The environment in which Slurm's commands find one node."""
    folder, script = tmp_path / "slurm", Path(__file__).with_name("slurm.sh")
    subprocess.run([script, "start", folder], check=True, timeout=60)
    yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    subprocess.run([script, "stop", folder], check=True, timeout=60)


def test_a_sweep_that_was_killed_with_its_jobs_goes_on(cluster: dict[str, Any], ground: Ground) -> None:
    words = [*ground.base, "-m", "policy=bild", "policy.fallback=0.2,0.3,0.4,0.5,0.6,0.7", *SLURM]
    command = [sys.executable, str(ROOT / "run.py"), *words]
    started = {"cwd": ground.folder, "env": cluster, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([*command, "hydra.launcher.array_parallelism=1"], text=True, **started)
    deadline = time.monotonic() + PATIENCE_S
    while len(ground.finished()) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    subprocess.run(["scancel", "--user=root", "--signal=KILL", "--full"], env=cluster, check=False)
    subprocess.run(["scancel", "--user=root"], env=cluster, check=True)
    printed, _ = process.communicate()
    before = ground.finished()
    assert 2 <= len(before) < 6, printed
    done = subprocess.run(command, timeout=PATIENCE_S, text=True, check=False, **started)
    assert done.returncode == 0, done.stdout
    ground.require_whole(6, before)
    assert "6 points" in done.stdout or done.stdout.count("bild fallback") == 6
    jobs = [file.name for file in (ground.sweep.folder / ".submitit").rglob("*_log.out")]
    assert len(jobs) >= 6 + len(before)  # of both commands, each point is a job
