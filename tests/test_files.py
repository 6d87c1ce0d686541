"""Where files are kept."""

from __future__ import annotations

import errno
import os
import pwd
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.files import (
    append_line,
    cache_folder,
    holding,
    json_text,
    sync_folder,
    write_atomically,
)


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
    synced: list[int] = []

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    for unknown in (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP):
        number = unknown
        synced.clear()
        write_atomically(tmp_path / "file", b"whole")
        assert (tmp_path / "file").read_bytes() == b"whole" and len(synced) == 1
    number = errno.EIO  # a disk that fails is another matter
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_rights_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    """Fault: 644 always, which a group that shares a folder cannot write, and a stranger can read."""
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", b"whole")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_who_holds_a_lock_is_waited_for_as_long_as_was_said(tmp_path: Path) -> None:
    lock, order = tmp_path / "lock", []

    def note(name: str, patience_s: float) -> None:
        with holding(lock, patience_s):
            order.append(name)

    with ThreadPoolExecutor(1) as other:
        with holding(lock):
            note("without it", 0.0)  # nobody waits for ever unless asked
            waiting = other.submit(note, "afterwards", -1)
            time.sleep(0.3)
            order.append("held")
        waiting.result()
    assert order == ["without it", "held", "afterwards"]


def test_where_no_lock_can_be_had_the_work_is_done_without_one(tmp_path: Path) -> None:
    with holding(tmp_path / "no folder" / "lock"):
        done = True
    assert done


def test_a_line_is_added_to_a_new_file_a_whole_one_and_one_that_was_cut_short(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a" / "b" / "lines"
    append_line(file, "first")
    assert file.read_bytes() == b"first\n"
    append_line(file, "café")
    with file.open("ab") as stream:
        stream.write(b"cut")
    append_line(file, "last")
    assert file.read_text(encoding="utf-8").splitlines() == ["first", "café", "cut", "last"]


def test_json_for_people_shows_every_letter() -> None:
    assert json_text({"text": "Höhe 語"}) == '{\n  "text": "Höhe 語"\n}\n'
