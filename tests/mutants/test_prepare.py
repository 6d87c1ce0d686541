"""A module made ready for mutation does what it did, and its tests run in the best order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.prepare import PROJECT, ready

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
    assert pytest.main([*arguments(tmp_path), str(file)]) == 0


ORDERED = """
import signal


def test_slow():
    assert 45 < signal.alarm(0) <= 50


def test_quick():
    assert 20 < signal.alarm(0) <= 25


def test_that_notices():
    assert 40 < signal.alarm(0) <= 45
    raise AssertionError
"""


def test_tests_that_noticed_other_mutants_of_the_function_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_ordered.py").write_text(ORDERED)
    seconds = {"test_slow": 3, "test_quick": 0.5, "test_that_notices": 2.5}
    named = {f"test_ordered.py::{name}": each for name, each in seconds.items()}
    (tmp_path / "mutmut-stats.json").write_text(json.dumps({"duration_by_test": named}))
    monkeypatch.chdir(tmp_path)
    found = []
    for mutant in ("", "module.x_one__mutmut_1", "module.x_one__mutmut_12", "module.x_two__mutmut_1"):
        command = [sys.executable, "-m", "pytest", *arguments(tmp_path), "-vv", "-x"]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), "MUTANT_UNDER_TEST": mutant}
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
        found.append(re.findall(r"::test_(\w+) [PF]", told))
    as_written, first, second, another = found
    assert as_written == ["slow"]  # without an alarm, as no mutant is under test
    assert first == another == ["quick", "that_notices"] and second == ["that_notices"]
    assert (tmp_path / "noticed" / "module.x_one").read_text() == "test_ordered.py::test_that_notices\n" * 2


def arguments(folder: Path) -> list[str]:
    return ["-q", "--rootdir", str(folder), "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
