"""How much memory this process can still take: of a GPU, or of the machine within the limits of its
container.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil
import torch

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # of Linux's control groups


@dataclass(frozen=True)
class MemoryFiles:
    """How a version of control groups names a limit, what is used of it, and the lines of
    memory.stat.
    """

    limit: str
    used: str
    prefix: str = ""


V1 = MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = MemoryFiles("memory.max", "memory.current")


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, min([psutil.virtual_memory().available, *free_in_groups()]))


def free_in_groups(mounted: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[int]:
    """Bytes that are free in each control group of this process that has a limit, of version 1 or
    2.

    A group's limit counts for those below it. Inside a container its own group may be the topmost
    that is seen.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mounts, files = (mounted, mounted / "unified"), V2
        elif "memory" in controllers.split(","):
            mounts, files = (mounted / "memory",), V1
        else:
            continue
        path = PurePosixPath(group.lstrip("/"))
        for mount in mounts:
            for folder in (path, *path.parents):
                if (free := _free_in(mount / folder, files)) is not None:
                    yield free


def _free_in(group: Path, files: MemoryFiles) -> int | None:
    """None without a limit.

    Pages of files that can be read again are free, as in `MemAvailable`.
    """
    try:
        limit, used = (int((group / name).read_text()) for name in (files.limit, files.used))
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        statistics = {name: int(value) for name, value in lines}
    except (OSError, ValueError):  # ValueError: the limit is the word max
        return None
    pages = sum(
        statistics.get(f"{files.prefix}{name}", 0) for name in ("active_file", "inactive_file")
    )
    return limit - used + pages
