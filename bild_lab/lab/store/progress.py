"""How far a sweep is (`SweepProgress`), on the terminal too (`PointProgress`), and its commands in
`commands.jsonl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from bild_lab.lab.config.console import SILENCE_S, console, status_line
from bild_lab.lab.schema.formatting import counted

# the stage whose examples are counted; those of further repeats begin with it
DECODING = "decoding"


class PointProgress:
    """Two or three lines on a terminal, which go when the block ends: the point, its stage, the
    sweep.

    In a file or a pipe it is a line for each point when it begins, one for each stage that lasts
    some seconds, and then one a minute.

    place: of the point among `points`, from 1. typical_s: seconds that a point of this sweep takes;
    None if none was measured yet.
    """

    def __init__(
        self,
        title: str,
        examples: int,
        place: int = 1,
        points: int = 1,
        typical_s: float | None = None,
    ):
        self._title, self._examples = title, examples
        self._later = max(0, points - place)
        self._typical_s = typical_s
        self._done = 0.0
        self._started_s = self._decoding_s = self._spoke_s = time.perf_counter()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.fields[count]}"),
            console=console,
            expand=True,
        )
        self._stage = self._bars.add_task("", total=None, count="")
        self._sweep = None
        if points > 1:
            self._place = f"{place - 1}/{points}"
            self._sweep = self._bars.add_task(
                "sweep", total=points, completed=place - 1, count=self._place
            )
        lines = Group(Text(title, no_wrap=True, overflow="ellipsis"), self._bars)
        self._live = Live(
            lines, console=console, transient=True, refresh_per_second=4, redirect_stdout=False
        )

    def __enter__(self) -> PointProgress:
        status_line.leave()
        if not console.is_terminal:
            console.print(f"{escape(self._title)}: {counted(self._examples, 'text')} …")
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ):
        status_line.leave()
        self._live.stop()

    def stage(self, name: str) -> None:
        """The point has reached this stage."""
        total, count_text = (
            (self._examples, f"0/{self._examples}") if name.startswith(DECODING) else (None, "")
        )
        self._bars.reset(self._stage, description=name, total=total, count=count_text)
        self._done, self._decoding_s = 0.0, time.perf_counter()
        if not console.is_terminal:
            status_line.show_later(f"{self._title}: {name} …")

    def advance(self, texts: float) -> None:
        """So much more is decoded, in texts with all their repeats."""
        status_line.leave()
        self._done += texts
        now = time.perf_counter()
        decoding_s = now - self._decoding_s
        left_s = decoding_s / self._done * max(0.0, self._examples - self._done)
        count_text = f"{int(self._done + 1e-9)}/{self._examples}, {roughly(left_s)} left"
        self._bars.update(self._stage, completed=self._done, count=count_text)
        sweep_s = left_s + self._later * (self._typical_s or now - self._started_s + left_s)
        line = f"{self._title}: {count_text}"
        if self._sweep is not None:
            sweep_text = f"{roughly(sweep_s)} left"
            self._bars.update(self._sweep, count=f"{self._place}, {sweep_text}")
            line = f"{line}; of the sweep {sweep_text}"
        # where no bars are shown, and none was printed for long
        if not console.is_terminal and now - self._spoke_s >= SILENCE_S:
            console.print(escape(line))
            self._spoke_s = now


def roughly(seconds: float) -> str:
    """A time that is estimated, in words: `40 s`, `3 min`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@dataclass
class SweepProgress:
    """What this process's command wants to measure, and how much of it is done."""

    # points; None if it is not known, as in a search, and in the processes of a launcher
    total: int | None = None
    done: int = 0  # points that were measured, found finished or failed
    measured: int = 0  # of these, those that this command measured
    measured_s: float = 0.0  # seconds that measuring them took
    reported: set[str] = field(default_factory=set)  # hashes of the points that have a result
    failed: set[str] = field(default_factory=set)
    folder: Path | None = None  # of the sweep; None in the processes of a launcher
    # writes the report and exits when the launcher raises this error, as it does when one of its
    # jobs dies; None where points are measured in this process
    report_lost: Callable[[Exception], NoReturn] | None = None

    def __str__(self) -> str:
        return f"{self.done} of {self.total} points"

    @property
    def typical_s(self) -> float | None:
        """Seconds that a point takes, None if none was measured yet."""
        return self.measured_s / self.measured if self.measured else None

    def advance(self, measured_s: float | None) -> None:
        """One point more is done. measured_s: seconds that it took; None if it was finished before,
        or failed.
        """
        self.done += 1
        if measured_s is not None:
            self.measured += 1
            self.measured_s += measured_s


_command_progress: ContextVar[SweepProgress] = ContextVar("command_progress")


def begin_progress(total: int | None, folder: Path | None = None) -> None:
    """A command of so many points, whose sweep is in `folder`, begins in this context."""
    _command_progress.set(SweepProgress(total, folder=folder))


def command_progress() -> SweepProgress:
    """The progress of the command that runs in this context; a launcher's worker has its own."""
    if (progress := _command_progress.get(None)) is None:
        progress = SweepProgress()
        _command_progress.set(progress)
    return progress
