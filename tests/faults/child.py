"""What runs in a sweep's own process: the application, and the fault that strikes it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import bild_lab.lab.measure.runner
import bild_lab.lab.point.environment
import bild_lab.lab.store.records
import bild_lab.lab.sweep
import bild_lab.report.page.html
import bild_lab.report.pareto_figure
import run
import tests.tiny  # noqa: F401  (with the models' classes, which Transformers imports late)
from bild_lab.lab.config.entrypoint import run_application


@dataclass(frozen=True)
class KillAfter:
    """kill -9, some seconds after the start."""

    seconds: float

    def __call__(self) -> None:
        threading.Timer(self.seconds, die).start()


@dataclass(frozen=True)
class KillAtCall:
    """kill -9 at the n-th call of os.NAME, just before it or just after; target: only calls that
    write this name.
    """

    name: str
    after: bool = False
    nth: int = 1
    target: str | None = None

    def __call__(self) -> None:
        original, seen = getattr(os, self.name), [0]

        def call(*arguments: Any, **options: Any) -> Any:
            seen[0] += self.target is None or Path(arguments[-1]).name == self.target
            struck = seen[0] == self.nth
            if struck and not self.after:
                die()
            returned = original(*arguments, **options)
            if struck:
                die()
            return returned

        setattr(os, self.name, call)


@dataclass(frozen=True)
class KillHalfWritten:
    """kill -9 when half of the n-th point's file of this name has reached the disk."""

    file: str
    nth: int = 1

    def __call__(self) -> None:
        original, seen = Path.open, [0]

        def opened(path: Path, *arguments: Any, **options: Any) -> Any:
            stream = original(path, *arguments, **options)
            if path.name != self.file or "wb" not in arguments:
                return stream
            seen[0] += 1
            return HalfWriter(stream) if seen[0] == self.nth else stream

        Path.open = opened


class HalfWriter:
    """A file that takes half of what is written to it, and then the process with it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> HalfWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, content: bytes) -> None:
        self._stream.write(content[: len(content) // 2])
        self._stream.flush()
        die()


@dataclass(frozen=True)
class FillDisk:
    """Fill the disk once the n-th point has been measured, before it is written."""

    filler: Path
    nth: int = 1

    def __call__(self) -> None:
        original, seen = bild_lab.lab.measure.runner.time_methods, [0]

        def timed(*arguments: Any) -> Any:
            result = original(*arguments)
            seen[0] += 1
            if seen[0] == self.nth:
                fill(self.filler)
            return result

        bild_lab.lab.measure.runner.time_methods = timed


def fill(file: Path) -> None:
    """Write until the disk takes no more."""
    with file.open("wb", buffering=0) as stream:
        for size in (2**16, 2**10, 1):
            try:
                while stream.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


@dataclass(frozen=True)
class ClockSetBack:
    """The system's clock says an earlier day once a point has been timed, in every module that
    looks at it.
    """

    days: float

    def __call__(self) -> None:
        shift, real = timedelta(), time.time
        original = bild_lab.lab.measure.runner.time_methods

        class Shifted(datetime):
            @classmethod
            def now(cls, zone: tzinfo | None = None) -> datetime:
                return datetime.now(zone) + shift

        def timed(*arguments: Any) -> Any:
            nonlocal shift
            result = original(*arguments)
            shift = -timedelta(days=self.days)
            return result

        bild_lab.lab.measure.runner.time_methods = timed
        bild_lab.lab.store.records.datetime = Shifted
        bild_lab.lab.point.environment.datetime = Shifted
        time.time = lambda: real() + shift.total_seconds()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal comes before this ends


def main(words: list[str], folder: Path, log: Path, fault: Callable[[], None] | None) -> None:
    """Run `python run.py WORDS` in a folder, its output in a file."""
    os.chdir(folder)
    with log.open("ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    sys.argv = ["run.py", *words]
    if fault is not None:
        fault()
    run_application(run.main)
