"""Free memory is that of the container, whichever version of control groups limits it, not the
host's.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from bild_lab.engine.models import device
from bild_lab.engine.models.device import (
    V1,
    V2,
    MemoryFiles,
    free_bytes,
    free_in_groups,
)

MIB = 1024**2


def write_group(folder: Path, files: MemoryFiles, limit: int | str, used: int, cached: int) -> None:
    """cached: bytes of file pages, most of them inactive."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files.limit).write_text(f"{limit}\n")
    (folder / files.used).write_text(f"{used}\n")
    lines = {
        "anon": used - cached,
        "active_file": cached // 4,
        "inactive_file": cached - cached // 4,
        "shmem": 7,
    }
    text = "".join(
        f"{prefix}{name} {value}\n"
        for prefix in {files.prefix, ""}
        for name, value in lines.items()
    )
    (folder / "memory.stat").write_text(text)


def free(folder: Path, membership: str) -> list[int]:
    (folder / "membership").write_text(membership)
    return sorted(free_in_groups(folder, folder / "membership"))


@pytest.mark.parametrize(
    ("files", "mount", "line"),
    [
        (V2, "", "0::/jobs/mine\n"),
        (V2, "unified", "0::/jobs/mine\n"),
        (V1, "memory", "4:cpu,memory:/jobs/mine\n"),
    ],
    ids=["v2", "v2 beside v1", "v1"],
)
def test_what_is_free_is_the_limit_less_what_cannot_be_reclaimed(
    files: MemoryFiles, mount: str, line: str, tmp_path: Path
) -> None:
    groups = tmp_path / mount
    write_group(groups / "jobs/mine", files, 1000 * MIB, 600 * MIB, 200 * MIB)
    assert free(tmp_path, f"9:pids:/elsewhere\n{line}") == [600 * MIB]
    write_group(groups / "jobs", files, 900 * MIB, 700 * MIB, 200 * MIB)  # of all jobs together
    assert free(tmp_path, line) == [400 * MIB, 600 * MIB]


def test_inside_a_container_the_topmost_group_that_is_seen_counts(tmp_path: Path) -> None:
    write_group(tmp_path, V2, 500 * MIB, 100 * MIB, 0)
    assert free(tmp_path, "0::/\n") == free(tmp_path, "0::/docker/abc\n") == [400 * MIB]


def test_without_a_limit_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_group(tmp_path, V2, "max", 100 * MIB, 0)
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
