"""What a command prints: its two consoles, the line that says what it does now, and progress bars."""

from __future__ import annotations

import io
import sys
import time
from threading import Timer
from typing import Any

from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner

from bild_lab.lab.config.command_line import as_typed

SOON_S, SILENT_S = 3.0, 60.0  # without a line in a file or a pipe: of a stage, of any command


class Said(Console):
    """A stream for people. It names commands as they were typed."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(
            *(as_typed(printed) if isinstance(printed, str) else printed for printed in objects),
            **options,
        )


console = Said(stderr=True, soft_wrap=True, highlight=False)
output = Said(soft_wrap=True, highlight=False)


class Stages:
    """The line on a terminal that says what the command is doing now.

    It goes when something is printed on the output, and when the command ends. In a file or a pipe
    it is a line that stays, of what lasts some seconds. began_s: when the command began, by the
    clock of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self._live: Live | Timer | None = None
        self.began_s = time.perf_counter()

    def enter(self, name: str) -> None:
        """From now on the command is doing this."""
        if not console.is_terminal:
            self.soon(f"{name} …")
        elif not console.quiet:
            self.leave()
            line = Spinner("dots", f"[dim]{escape(name)} …[/dim]")
            self._live = Live(
                line, console=console, transient=True, refresh_per_second=5, redirect_stdout=False
            )
            self._live.start(refresh=True)

    def soon(self, said: str) -> None:
        """Print this if it is still true in a few seconds."""
        self.leave()
        self._live = Timer(SOON_S, console.print, [escape(said)])
        self._live.daemon = True
        self._live.start()

    def leave(self) -> None:
        """Remove the line."""
        if self._live is not None:
            self._live.cancel() if isinstance(self._live, Timer) else self._live.stop()
            self._live = None

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by `output` before it prints (a render hook of rich)."""
        self.leave()
        return renderables


stages = Stages()
output.push_render_hook(stages)


class Bar(Progress):
    """In a file or a pipe, where no bar is seen, it is a line after each minute without one."""

    _spoke_s = 0.0

    def start(self) -> None:
        super().start()
        self._spoke_s = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._spoke_s = time.monotonic()
        self.console.print(line)

    def update(self, task_id: int, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say_what_is_done(task_id)

    def advance(self, task_id: int, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say_what_is_done(task_id)

    def _say_what_is_done(self, task_id: int) -> None:
        if (
            not self.disable
            and not self.console.is_terminal
            and time.monotonic() - self._spoke_s >= SILENT_S
        ):
            task = next(
                progress_task for progress_task in self.tasks if progress_task.id == task_id
            )
            total = "" if task.total is None else f" of {task.total:,.0f}"
            self.say(f"{escape(task.description)}: {task.completed:,.0f}{total}")


def progress(*columns: ProgressColumn, shown: bool = True) -> Bar:
    """A bar of what is done, with the time left, in place of the stage.

    It goes when its block ends.
    """
    stages.leave()
    all_columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(),
    )
    return Bar(
        *all_columns,
        console=console,
        transient=True,
        expand=True,
        disable=not shown,
        refresh_per_second=4,
    )


def tolerate_streams() -> None:
    """Print a question mark for a character that the terminal or the pipe cannot show, rather than
    stop there.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has streams of its own
            stream.reconfigure(errors="replace")
