"""`hydra/launcher=gpus`, `joblib`, `submitit_local`, and a Slurm of one node: workers' results, one
report, flagged timings.
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
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

import run
from tests.faults.conftest import PATIENCE_S, Ground

SCRIPT = Path(run.__file__)
SWEEP = ("-m", "policy=bild", "policy.fallback=0.2,0.4,0.6")
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
SUBMITIT = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10")
GPUS = ("hydra/launcher=gpus",)
SLURM = (
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=tested",
    "hydra.launcher.cpus_per_task=1",
)
CLUSTER = Path(__file__).with_name("slurm.sh")

pytestmark = pytest.mark.slow


def started(ground: Ground, *words: str, **variables: str) -> subprocess.Popen[str]:
    """A process of its own with its own temporary folder, so that only its jobs are seen beside
    each other.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), str(ground.folder)]),
        "TMPDIR": str(ground.folder),
        "COLUMNS": "200",
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *ground.base, *words],
        cwd=ground.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def swept(ground: Ground, *words: str, **variables: str) -> tuple[int, str]:
    process = started(ground, *words, **variables)
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


# a logger of a point's process: what it sees, and when it measured the point
WATCHING = """
import json, os, signal, sys, time
from pathlib import Path

class Watch:
    def log_point(self, result, values):
        time.sleep(float(os.environ.get("LINGERING_S", 0)))
        seen = os.environ["CUDA_VISIBLE_DEVICES"]
        threads = os.environ["OMP_NUM_THREADS"]
        began, ended = time.time() - result.total_s, time.time()
        fallback = values["policy"]["fallback"]
        with Path("watched").open("a") as file:
            print(json.dumps([seen, threads, os.getpid(), began, ended, fallback]), file=file)
        if str(fallback) == os.environ.get("STRUCK") and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def log_sweep(self, sweep):
        pass

    def closing(self):
        return []
"""


@pytest.fixture
def watched(ground: Ground) -> Ground:
    """A sweep's ground whose points say which GPU they saw."""
    folder = ground.folder / "mine" / "logger"
    folder.mkdir(parents=True)
    (folder / "watch.yaml").write_text("_target_: watching.Watch\n")
    (ground.folder / "watching.py").write_text(WATCHING)
    words = ["--config-dir", str(folder.parent), "logger=watch"]
    return Ground(ground.folder, [*ground.base, *words], ground.server)


def seen_by_points(ground: Ground) -> list[list]:
    return [json.loads(line) for line in (ground.folder / "watched").read_text().splitlines()]


def test_points_on_the_gpus_of_a_node_never_share_one(watched: Ground) -> None:
    fallbacks = ",".join(str(number / 10) for number in range(1, 7))
    words = ("-m", "policy=bild", f"policy.fallback={fallbacks}", *GPUS)
    code, printed = swept(watched, *words, CUDA_VISIBLE_DEVICES="3,GPU-5e", OMP_NUM_THREADS="1")
    assert code == 0, printed
    watched.require_whole(6, {})
    points = seen_by_points(watched)
    assert {seen for seen, *_ in points} == {"3", "GPU-5e"} and len(points) == 6
    assert len({process for _, _, process, *_ in points}) == 2  # each keeps its models
    for seen in ("3", "GPU-5e"):
        spans = sorted((began, ended) for device, _, _, began, ended, _ in points if device == seen)
        assert all(ended <= after for (_, ended), (after, _) in pairwise(spans)), spans
    code, printed = swept(watched, *words, CUDA_VISIBLE_DEVICES="3,GPU-5e", OMP_NUM_THREADS="1")
    assert code == 0 and printed.count("finished before") == 6, printed


def test_a_point_whose_process_dies_has_failed_and_the_others_are_measured(
    watched: Ground,
) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "0,1", "STRUCK": "0.4"}
    code, printed = swept(watched, *SWEEP, *GPUS, **variables)
    assert code == 1 and "its process ended" in printed and "1 point(s) failed" in printed, printed
    assert {fallback for *_, fallback in seen_by_points(watched)} == {0.2, 0.4, 0.6}
    assert (watched.sweep.folder / "report.html").is_file()
    code, printed = swept(watched, *SWEEP, *GPUS, **variables)
    assert code == 0 and printed.count("finished before") == 3, printed
    watched.require_whole(3, {})


@pytest.mark.parametrize("launcher", [JOBLIB, SUBMITIT], ids=["joblib", "submitit_local"])
def test_a_lost_job_ends_in_a_report_of_the_finished_points_and_the_same_command_runs_the_rest(
    launcher: tuple[str, ...], watched: Ground
) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "STRUCK": "0.2"}
    code, printed = swept(watched, *SWEEP, *launcher, **variables)
    assert code == 1 and "the launcher failed" in printed, printed
    assert "the same command runs the rest" in printed and "Traceback" not in printed, printed
    finished = watched.finished()
    if launcher == SUBMITIT:  # each job has a process of its own, and the command waits for it
        assert len(finished) == 3
    watched.require_whole(len(finished), {})
    code, printed = swept(watched, *SWEEP, *launcher, **variables)
    assert code == 0, printed
    watched.require_whole(3, finished)


def test_a_signal_ends_the_jobs_of_submitit_too(watched: Ground) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "LINGERING_S": "600"}
    process = started(watched, *SWEEP, *SUBMITIT, **variables)
    deadline = time.monotonic() + PATIENCE_S
    while not watched.finished() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    jobs = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143 and "stopped" in printed, printed
    watched.require_whole(len(watched.finished()), {})
    assert len(jobs) >= 6 and psutil.wait_procs(jobs, timeout=1)[1] == []


def test_without_a_gpu_to_see_or_with_a_spread_target_nothing_is_measured(ground: Ground) -> None:
    code, printed = swept(ground, *SWEEP, *GPUS, CUDA_VISIBLE_DEVICES="")
    assert code == 2 and "none is visible" in printed, printed
    words = (*SWEEP, *GPUS, "runtime.device_map=auto")
    code, printed = swept(ground, *words, CUDA_VISIBLE_DEVICES="0,1")
    assert code == 2 and "shows each point one" in printed, printed


@pytest.mark.parametrize("launcher", [JOBLIB, GPUS], ids=["joblib", "gpus"])
def test_a_signal_ends_the_workers_too_and_reports(
    launcher: tuple[str, ...], ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    fallbacks = ",".join(str(number / 100) for number in range(10, 70))
    process = started(ground, "-m", "policy=bild", f"policy.fallback={fallbacks}", *launcher)
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
