"""Where files are kept."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.files import cache_folder, sync_folder, write_atomically


def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a traceback, in a container whose user is a number that the system does not know."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("BILD_LAB_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(UserError, match="no home directory is known .* export BILD_LAB_CACHE=DIR"):
        cache_folder()
    monkeypatch.setenv("BILD_LAB_CACHE", "/cache")
    assert cache_folder() == Path("/cache")


def test_a_file_is_written_on_a_disk_that_cannot_sync_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: no point could be stored there, by a bare `Invalid argument`."""
    number, synced = errno.EINVAL, []

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    write_atomically(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole" and len(synced) == 1
    number = errno.EIO  # a disk that fails is another matter
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
