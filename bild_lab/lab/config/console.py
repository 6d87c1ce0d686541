"""What a command prints: its consoles, the line that says what it does now, and progress bars."""

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

# in a file or a pipe: seconds until a stage has a line, and the longest time without any line
STAGE_UNSAID_S = 3.0
SILENCE_S = 60.0


class CommandConsole(Console):
    """A stream for people. It names commands as they were typed."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(
            *(as_typed(printed) if isinstance(printed, str) else printed for printed in objects),
            **options,
        )


console = CommandConsole(stderr=True, soft_wrap=True, highlight=False)
output = CommandConsole(soft_wrap=True, highlight=False)


class StatusLine:
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
            self.show_later(f"{name} …")
        elif not console.quiet:
            self.leave()
            spinner = Spinner("dots", f"[dim]{escape(name)} …[/dim]")
            self._live = Live(
                spinner,
                console=console,
                transient=True,
                refresh_per_second=5,
                redirect_stdout=False,
            )
            self._live.start(refresh=True)

    def show_later(self, line: str) -> None:
        """Print this if it is still true in a few seconds."""
        self.leave()
        self._live = Timer(STAGE_UNSAID_S, console.print, [escape(line)])
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


status_line = StatusLine()
output.push_render_hook(status_line)


class ProgressBar(Progress):
    """In a file or a pipe, where no bar is seen, it is a line after each minute without one."""

    _printed_s = 0.0

    def start(self) -> None:
        super().start()
        self._printed_s = time.monotonic()

    def print_line(self, line: str) -> None:
        """Print a line that stays."""
        self._printed_s = time.monotonic()
        self.console.print(line)

    def update(self, task_id: int, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print_count(task_id)

    def advance(self, task_id: int, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_count(task_id)

    def _print_count(self, task_id: int) -> None:
        if (
            not self.disable
            and not self.console.is_terminal
            and time.monotonic() - self._printed_s >= SILENCE_S
        ):
            task = next(
                progress_task for progress_task in self.tasks if progress_task.id == task_id
            )
            total = "" if task.total is None else f" of {task.total:,.0f}"
            self.print_line(f"{escape(task.description)}: {task.completed:,.0f}{total}")


def progress_bar(*columns: ProgressColumn, shown: bool = True) -> ProgressBar:
    """A bar of what is done, with the time left, in place of the stage.

    It goes when its block ends.
    """
    status_line.leave()
    all_columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(),
    )
    return ProgressBar(
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
    for stream in text_streams():
        stream.reconfigure(errors="replace")


def text_streams() -> list[io.TextIOWrapper]:
    """Output and errors of the process, but for a notebook's, which are of its own kind."""
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
