"""Commands in processes of their own, which can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil

ROOT = Path(__file__).resolve().parents[2]
# by torchrun, with gloo on CPUs; with --cpu Accelerate starts one process, whatever the number
TWO = (
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes=2",
    "--main_process_port=0",
)


def started(script: ModuleType, folder: Path, words: list[str], *launcher: str) -> subprocess.Popen:
    """A script in this folder. launcher: `TWO` for two processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *launcher, script.__file__, *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: subprocess.Popen) -> str:
    """What a process printed that ended well."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    return printed


def killed_when(reached: Callable[[], bool], process: subprocess.Popen) -> None:
    """Kill the process and its children, which torchrun gives sessions of their own, once this is
    so.
    """
    while not reached():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        each.kill()
    process.communicate()
