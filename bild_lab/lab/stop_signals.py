"""Ending a sweep by Ctrl-C or `kill`: the point being measured is dropped, finished points are reported."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal asked the process to stop. code: the exit status, 130 for SIGINT and 143 for SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


class StopSignals:
    """How the process that runs a sweep reacts to stop signals.

    While a point is being measured, `Stopped` is raised inside it. At other times, such as while a launcher's
    workers measure, `finish` is called with the exit status. A second signal ends the process as usual.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._measuring = False
        self._finish: Callable[[int], None] = lambda code: None

    def install(self, finish: Callable[[int], None]) -> None:
        """Handle the signals from now on."""
        self._finish = finish
        self._before = {number: signal.signal(number, self._stop) for number in SIGNALS}

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """While the block runs, a point is being measured."""
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False

    def _stop(self, number: int, _: Any) -> None:
        self.restore()
        if self._measuring:
            raise Stopped(number)
        self._finish(128 + number)
