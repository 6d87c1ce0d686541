"""Fixtures that several test modules share."""

import errno
import fcntl
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

gc.disable()  # until the tests are collected: what is made by then stays
# read once, before torch is: of processes that share the cores, a second thread waits by spinning
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# read when Triton is imported: its kernels run on this CPU (tests/triton_interpreter.py)
if os.environ.get("BILD_LAB_TEST_DEVICE") != "cuda":
    os.environ.setdefault("TRITON_INTERPRET", "1")


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


def fast_only(config: pytest.Config) -> bool:
    """Whether the tests of `make test` run, none of which is slow."""
    return config.getoption("markexpr") == "not slow"


def marker_of(test: object, name: str) -> pytest.Mark | None:
    """The first marker of this name on a test function."""
    return next((mark for mark in getattr(test, "pytestmark", ()) if mark.name == name), None)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> Generator[None, Any, Any]:
    """Of a table with the marker `fast`, mark all cases but those that it names as slow.

    Raises CollectError for a name that no case has, and for a table that is slow as a whole.
    """
    made = yield
    marker = marker_of(obj, "fast")
    if marker is None or not isinstance(made, list):
        return made
    cases = {case.callspec.id: case for case in made}
    if unknown := set(marker.args) - set(cases):
        raise pytest.Collector.CollectError(f"{name} has no case {sorted(unknown)[0]!r}")
    fast = [cases[case_id] for case_id in marker.args]
    if slow := [case for case in fast if case.get_closest_marker("slow")]:
        raise pytest.Collector.CollectError(f"{name} calls {slow[0].callspec.id!r} fast and slow")
    if fast_only(collector.config):
        return fast
    for case in made:
        if case not in fast:
            case.add_marker(pytest.mark.slow)
    return made


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


@pytest.fixture(scope="module")
def found_configuration() -> Iterator[None]:
    """The configuration is found once for all tests of a module."""
    from hydra import initialize_config_dir

    from bild_lab.lab.config.compose import HYDRA_VERSION, config_dir

    with initialize_config_dir(str(config_dir()), **HYDRA_VERSION):
        yield


@pytest.fixture
def fake_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Peers run a stand-in for their engines. Returns the cache of converted checkpoints."""
    from tests.benchmark.fake import run_fake_engines

    return run_fake_engines(tmp_path, monkeypatch)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of sweeps come without their picture, which takes a second to draw."""
    monkeypatch.setattr("bild_lab.report.pareto_figure.draw_pareto", lambda *_: None)


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
    # no line says what takes long, which on a busy machine anything may
    monkeypatch.setattr("bild_lab.lab.config.console.STAGE_UNSAID_S", 600.0)

    def call(script: ModuleType, *words: str, config: str | None = "config") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__.rpartition('.')[2]}.py", *words])
        with pytest.raises(SystemExit) as ended:
            run_application(script.main, config)
        out = capfd.readouterr()
        return ended.value.code or 0, out.out + out.err

    return call


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be locked, as on some network disks."""

    def refused(_: object, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
