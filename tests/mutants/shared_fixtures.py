"""A plugin of pytest: what a fixture of a module or session ran counts for every test that uses it.

mutmut notes which functions each test runs, and runs only these tests against a mutant. What such a fixture runs, it
would note for the first of its tests alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mutmut.state import state

_ran: dict[Any, set[str]] = {}  # by fixture


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
