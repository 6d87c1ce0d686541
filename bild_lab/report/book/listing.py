"""The files below a folder: how large they are, when they were written, and whether anything changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Listing:
    """size_bytes: of all files together. written: when the newest of them was, as ISO date and time; empty without
    files. mark: changes when a file is added, removed or written.
    """

    size_bytes: int
    written: str
    mark: str


def listed(folder: Path, skipped: tuple[str, ...] = ()) -> Listing:
    """List a folder with all folders in it. What cannot be read is left out, and links are not followed.

    skipped: names of folders to leave out. Lock files never count.
    """
    size, newest, mark = 0, 0, hashlib.sha256()
    for path, status in sorted(_files(str(folder), skipped)):
        size += status.st_size
        newest = max(newest, status.st_mtime_ns)
        mark.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return Listing(size, moment(newest / 1e9) if newest else "", mark.hexdigest()[:20])


def moment(seconds: float) -> str:
    """A time of the file system as ISO date and time, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _files(folder: str, skipped: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(OSError), os.scandir(folder) as found:
        for one in found:
            with suppress(OSError):
                if one.is_dir(follow_symlinks=False):
                    if one.name not in skipped:
                        yield from _files(one.path, skipped)
                elif not one.name.endswith(".lock"):
                    yield one.path, one.stat(follow_symlinks=False)
