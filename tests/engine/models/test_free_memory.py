"""Free memory and cores are those of the container, whichever version of control groups limits
them, not the host's.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from bild_lab.engine.models import device
from bild_lab.engine.models.device import (
    MEMORY_FILES,
    cores_of_groups,
    default_threads,
    free_bytes,
    free_in_groups,
    thread_share,
    usable_cores,
)

MIB = 1024**2


def write_group(folder: Path, version: int, limit: int | str, used: int, cached: int) -> None:
    """cached: bytes of file pages, most of them inactive."""
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, version_prefix = MEMORY_FILES[version]
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    lines = {
        "anon": used - cached,
        "active_file": cached // 4,
        "inactive_file": cached - cached // 4,
        "shmem": 7,
    }
    text = "".join(
        f"{prefix}{name} {value}\n"
        for prefix in {version_prefix, ""}
        for name, value in lines.items()
    )
    (folder / "memory.stat").write_text(text)


def free(folder: Path, membership: str) -> list[int]:
    (folder / "membership").write_text(membership)
    return sorted(free_in_groups(folder, folder / "membership"))


@pytest.mark.parametrize(
    ("version", "mount", "line"),
    [
        (2, "", "0::/jobs/mine\n"),
        (2, "unified", "0::/jobs/mine\n"),
        (1, "memory", "4:cpu,memory:/jobs/mine\n"),
    ],
    ids=["v2", "v2 beside v1", "v1"],
)
def test_what_is_free_is_the_limit_less_what_cannot_be_reclaimed(
    version: int, mount: str, line: str, tmp_path: Path
) -> None:
    groups = tmp_path / mount
    write_group(groups / "jobs/mine", version, 1000 * MIB, 600 * MIB, 200 * MIB)
    assert free(tmp_path, f"9:pids:/elsewhere\n{line}") == [600 * MIB]
    write_group(groups / "jobs", version, 900 * MIB, 700 * MIB, 200 * MIB)  # of all jobs together
    assert free(tmp_path, line) == [400 * MIB, 600 * MIB]


def test_inside_a_container_the_topmost_group_that_is_seen_counts(tmp_path: Path) -> None:
    write_group(tmp_path, 2, 500 * MIB, 100 * MIB, 0)
    assert free(tmp_path, "0::/\n") == free(tmp_path, "0::/docker/abc\n") == [400 * MIB]


def test_without_a_limit_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_group(tmp_path, 2, "max", 100 * MIB, 0)
    assert free(tmp_path, "0::/\n") == free(tmp_path, "1:cpu:/\n") == []
    assert list(free_in_groups(tmp_path, tmp_path / "none")) == []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=800 * MIB))
    found: dict[str, list[int]] = {"limits": []}
    monkeypatch.setattr(device, "free_in_groups", lambda: iter(found["limits"]))
    cpu = torch.device("cpu")
    assert free_bytes(cpu) == 800 * MIB
    found["limits"] = [900 * MIB, 300 * MIB]
    assert free_bytes(cpu) == 300 * MIB
    found["limits"] = [-5]
    assert free_bytes(cpu) == 0


def test_what_pytorch_keeps_of_freed_tensors_on_a_gpu_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a batch, whose caches the next one takes again."""
    counts = {"reserved": 900 * MIB, "active": 300 * MIB, "inactive_split": 50 * MIB}
    counts = {f"{name}_bytes.all.current": count for name, count in counts.items()}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * MIB, 1000 * MIB))
    gpu = torch.device("cuda")
    assert free_bytes(gpu) == 650 * MIB
    counts.clear()  # before the first tensor
    assert free_bytes(gpu) == 100 * MIB


@pytest.mark.parametrize(
    ("files", "mount", "line"),
    [
        ({"cpu.max": "{quota} {period}"}, "", "0::/jobs/mine\n"),
        ({"cpu.max": "{quota} {period}"}, "unified", "0::/jobs/mine\n"),
        (
            {"cpu.cfs_quota_us": "{quota}", "cpu.cfs_period_us": "{period}"},
            "cpu",
            "4:cpu,cpuacct:/jobs/mine\n",
        ),
    ],
    ids=["v2", "v2 beside v1", "v1"],
)
def test_the_cores_of_a_container_are_its_share_of_their_time(
    files: dict[str, str], mount: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(line)

    def cores(quota: object, folder: str = "jobs/mine", period: int = 100_000) -> list[float]:
        group = tmp_path / mount / folder
        group.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (group / name).write_text(text.format(quota=quota, period=period) + "\n")
        return sorted(cores_of_groups(tmp_path, tmp_path / "membership"))

    assert cores(765_000) == [7.65]
    assert cores(200_000, "jobs", 50_000) == [4.0, 7.65]
    assert cores(-1 if "cpu.cfs_quota_us" in files else "max") == [4.0]
    assert list(cores_of_groups(tmp_path, tmp_path / "none")) == []


def test_threads_are_no_more_than_the_cores_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: PyTorch counts the cores of the machine, and threads beyond a container's share wait
    for each other.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 48)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(96)))
    limits: list[float] = []
    monkeypatch.setattr(device, "cores_of_groups", lambda: iter(limits))
    assert (usable_cores(), default_threads(), thread_share(4)) == (96, 48, "24")
    limits[:] = [7.65, 60.0]
    assert (usable_cores(), default_threads(), thread_share(4)) == (7, 7, "1")
    limits[:] = [0.5]
    assert (usable_cores(), default_threads(), thread_share(4)) == (1, 1, "1")
    limits.clear()
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {3, 5})  # as taskset binds it
    assert (usable_cores(), default_threads()) == (2, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "48")  # somebody has told
    assert (default_threads(), thread_share(4)) == (48, "48")
