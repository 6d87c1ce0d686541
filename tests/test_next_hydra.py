"""The next Hydra, in an environment of its own: every experiment composes, sweeps run, nothing is deprecated."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEXT = ["hydra-core>=1.4.0rc3", "omegaconf>=2.4.1rc1", "hydra-joblib-launcher>=1.4.0rc3"]
NEXT += ["hydra-submitit-launcher>=1.4.0rc3"]
TESTS = ["tests/test_experiments.py", "tests/lab/test_config.py", "tests/lab/test_application.py"]
TESTS += ["tests/lab/test_cli.py::test_a_sweep_leaves_everything_it_promises", "tests/faults/test_launchers.py"]


@pytest.mark.slow
def test_every_experiment_composes_and_sweeps_run_with_the_next_hydra(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "bin/python"
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--pre", "--ignore-installed", *NEXT],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"Hydra 1.4 cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "HYDRA_DEPRECATION_WARNINGS_AS_ERRORS": "1"}
    version = [python, "-c", "import hydra, bild_lab.lab.config as config; assert config.NEWER, hydra.__version__"]
    subprocess.run(version, env=settings, check=True)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT, env=settings, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
