"""Fixtures that several test modules share."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

gc.disable()  # until the tests are collected: what is made by then stays


def pytest_sessionstart(session: pytest.Session) -> None:
    """What every test needs.

    The process that only hands tests out to workers imports none of it.
    """
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        import torch

        from bild_lab.engine.models.native import why_no_kernels

        # compiles them now: what it says belongs to no test
        why_no_kernels(torch.device("cpu"), torch.float32)
        # fastest for tiny models, and leaves the other core to the other half of the tests
        torch.set_num_threads(1)


# tables of more cases than this are sampled by the fast tests, one of three; `make test-slow` runs
# all of them
LONG, STEP = 4, 3
SAMPLED = (
    "tests/engine/",
    "tests/training/",
    "tests/lab/store/test_code.py::test_code_that_measures",
    "tests/lab/point/test_load.py::test_every_policy",
    "tests/lab/point/test_load.py::test_lossless",
)
CHEAP = "tests/engine/methods/speculative/"  # its tables are run whole


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of long tables of cases, mark all but a third as slow, before slow tests are left out.

    The third of each next three shifts, so that grids are taken along their diagonals.
    """
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        sampled = item.nodeid.startswith(SAMPLED) and not item.nodeid.startswith(CHEAP)
        if sampled and "[" in item.nodeid and item.get_closest_marker("slow") is None:
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tables.values():
        if len(cases) > LONG:
            for place, case in enumerate(cases):
                if (place + place // STEP) % STEP:
                    case.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Objects that exist by now, mostly modules and tests, are not looked at again by the garbage
    collector.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    from tests.checkpoints import tiny_checkpoints

    return tiny_checkpoints()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import write_data

    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def fake_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Peers run a stand-in for their engines. Returns the cache of converted checkpoints."""
    from tests.benchmark.fake import run_fake_engines

    return run_fake_engines(tmp_path, monkeypatch)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a script's `main` in an empty folder; returns its exit code and everything it printed.

    config: the name of the script's own configuration; None for one that reads its words itself.
    """
    from bild_lab.lab.config.entrypoint import run_application

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(script: ModuleType, *words: str, config: str | None = "config") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__.rpartition('.')[2]}.py", *words])
        with pytest.raises(SystemExit) as ended:
            run_application(script.main, config)
        out = capfd.readouterr()
        return ended.value.code or 0, out.out + out.err

    return call
