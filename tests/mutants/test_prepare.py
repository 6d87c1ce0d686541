"""A module made ready for mutation does what it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.prepare import ready

CODE = """
from functools import cached_property, lru_cache


class Counted:
    def __init__(self):
        self.calls = 0

    @property
    def two(self):
        return 2

    @cached_property
    def once(self):
        self.calls += 1
        return self.calls

    @staticmethod
    def three():
        return 3

    def checked(self, value):
        if value < 0:
            raise ValueError(
                "too small"
            )
        return value


@lru_cache(maxsize=1)
@staticmethod
def four():
    return 4
"""


def test_decorators_are_called_behind_their_functions_and_errors_are_left_alone() -> None:
    changed = ready(CODE)
    assert "@property" not in changed and "    two = property(two)" in changed
    assert "@staticmethod\n    def three" in changed  # which mutmut knows
    assert "four = lru_cache(maxsize=1)(staticmethod(four))" in changed
    closed = [line.strip() for line in changed.splitlines() if line.endswith("# pragma: no mutate")]
    assert [line.partition("  #")[0] for line in closed] == ["raise ValueError(", '"too small"', ")"]
    names: dict = {}
    exec(changed, names)
    one = names["Counted"]()
    assert (one.two, one.once, one.once, one.three(), one.checked(5), names["four"]()) == (2, 1, 1, 3, 5, 4)


SHARING = """
import pytest
from mutmut.state import state


@pytest.fixture(scope="module")
def outer():
    state()._stats.add("outer")


@pytest.fixture(scope="module")
def shared(outer):
    state()._stats.add("shared")


def noted():
    found = set(state()._stats)
    state()._stats.clear()  # as mutmut does after each test
    return found


def test_first(shared):
    assert noted() == {"outer", "shared"}


def test_second(shared):
    assert noted() == {"outer", "shared"}


def test_third():
    assert noted() == set()
"""


def test_what_a_shared_fixture_ran_counts_for_each_of_its_tests(tmp_path: Path) -> None:
    (file := tmp_path / "test_sharing.py").write_text(SHARING)
    plugins = ["-p", "no:cacheprovider", "-p", "tests.mutants.shared_fixtures"]
    assert pytest.main(["-q", "--rootdir", str(tmp_path), "-c", "/dev/null", *plugins, str(file)]) == 0
