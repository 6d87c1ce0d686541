"""Where files are kept."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.files import cache_folder


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
