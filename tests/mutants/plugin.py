"""A plugin of pytest for mutmut: which tests run against a mutant, in what order, and for how long.

mutmut notes which functions each test runs, and runs only these tests against a mutant. What a fixture of a module or
session ran, it would note for the first of its tests alone; here it counts for each. The tests then run in a set's
order; here those that noticed the most other mutants of the same function come first, and then the quick ones.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mutmut.mutation.trampoline import get_mutant_under_test
from mutmut.state import state

_ran: dict[Any, set[str]] = {}  # by fixture
_durations: dict[str, float] = {}  # seconds of the tests against a mutant
NOTICED = pytest.StashKey[Path]()  # the file of the tests that noticed a mutant of the function, a line for each


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[Any]:
    noted = state()._stats
    before = set(noted)
    noted.clear()
    try:
        return (yield)
    finally:
        _ran[fixturedef] = set(noted)
        noted |= before


def pytest_runtest_call(item: pytest.Item) -> None:
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for one in definitions:
            state()._stats.update(_ran.get(one, ()))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    function, of_a_mutant, _ = get_mutant_under_test().partition("__mutmut_")
    if not of_a_mutant:
        return
    _durations.update(json.loads(Path("mutmut-stats.json").read_text())["duration_by_test"])
    config.stash[NOTICED] = file = Path("noticed", function).absolute()
    found = Counter(file.read_text().splitlines() if file.exists() else ())
    items.sort(key=lambda item: (-found[item.nodeid], _durations.get(item.nodeid, 0.0)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if NOTICED in item.config.stash:  # an alarm ends the process, which counts as noticed
        signal.alarm(round(20 + 10 * _durations.get(item.nodeid, 0.0)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed and (file := item.config.stash.get(NOTICED, None)):
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as several:
            several.write(f"{item.nodeid}\n")
    return report
