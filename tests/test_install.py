"""`make setup` asks for the build of PyTorch that the machine can run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# what stands in for the Python that asks for the index
REACHED, UNREACHED = "/bin/true", "/bin/false"


def pip_options(
    folder: Path, smi: str | None, python: str = REACHED, **others: str
) -> tuple[list[str], str]:
    """What the script prints and why, on a machine whose nvidia-smi is this program; None: without
    one.
    """
    if smi is not None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{smi}\n")
        program.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    path = f"{folder}{os.pathsep}{variables['PATH']}"
    done = subprocess.run(
        ["sh", "torch_index.sh"], cwd=ROOT, env={**variables, "PATH": path, "PYTHON": python, **others},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split(), done.stderr


def smi(cuda: str, *capabilities: str, driver: str = "580.65.06") -> str:
    """An nvidia-smi that answers as the real one does, which has other words from driver 610 on."""
    words = ("KMD", "CUDA UMD") if driver >= "610" else ("Driver", "CUDA")
    header = (
        f"| NVIDIA-SMI {driver}    {words[0]} Version: {driver}    {words[1]} Version: {cuda}     |"
    )
    listed = "\\n".join(capabilities)
    return f"""case "$*" in *compute_cap*) printf '{listed}\\n' ;; *) echo '{header}' ;; esac"""


@pytest.mark.parametrize(
    ("answer", "build"),
    [
        (None, "cpu"),
        ("echo NVIDIA-SMI has failed; exit 9", "cpu"),
        (smi("13.0", "9.0"), "cu130"),
        (smi("13.2", "8.0", "12.0"), "cu130"),
        (smi("13.3", "9.0", driver="610.43.02"), "cu130"),
        (smi("13.3", "7.0", driver="610.43.02"), "cu126"),
        (smi("12.8", "9.0"), "cu126"),
        (smi("12.0", "8.6"), "cu126"),
        (smi("12.8", "12.0"), "cpu"),
        (smi("13.0", "9.0", "7.0"), "cu126"),
        (smi("13.0", "3.5"), "cpu"),
        (smi("11.8", "8.0"), "cpu"),
    ],
)
def test_the_build_fits_the_driver_and_the_oldest_gpu(
    tmp_path: Path, answer: str | None, build: str
) -> None:
    options, why = pip_options(tmp_path, answer)
    assert options == ["--extra-index-url", f"https://download.pytorch.org/whl/{build}"]
    assert f"PyTorch for {build}" in why


@pytest.mark.parametrize(
    ("answer", "remedy"), [(smi("11.8", "8.0"), "525"), (smi("12.8", "12.0"), "580")]
)
def test_an_old_driver_is_named(tmp_path: Path, answer: str, remedy: str) -> None:
    assert f"update the driver to {remedy} or newer" in pip_options(tmp_path, answer)[1]


def test_a_build_can_be_asked_for_from_a_mirror(tmp_path: Path) -> None:
    options, _ = pip_options(
        tmp_path, smi("13.0", "9.0"), TORCH_BUILD="cu126", TORCH_WHEELS="http://mirror/whl"
    )
    assert options == ["--extra-index-url", "http://mirror/whl/cu126"]


def test_without_a_network_pips_own_settings_decide(tmp_path: Path) -> None:
    options, why = pip_options(tmp_path, None, UNREACHED)
    assert options == [] and "cannot be reached" in why


def test_make_setup_installs_pytorch_with_these_options() -> None:
    done = subprocess.run(
        ["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.endswith(" torch")]
    assert (
        "$(PYTHON=.venv/bin/python sh torch_index.sh) torch" in line
        and "-c constraints.txt" in line
    )
