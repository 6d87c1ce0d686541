"""The command lines that measured a sweep, in the file `commands.jsonl` of its folder."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from bild_lab.files import append_line
from bild_lab.lab.config.command_line import this_script

COMMANDS = "commands.jsonl"


@dataclass(frozen=True)
class Command:
    """A command line, and when it was first given (ISO, UTC)."""

    started: str
    line: str


def record_command(folder: Path) -> None:
    """Add this process's command line to the sweep in `folder`, unless it is there: the same
    command resumes.

    It is written as it can be typed again where it was typed.
    """
    line = f"{this_script()} {shlex.join(sys.argv[1:])}".rstrip()
    if any(command.line == line for command in read_commands(folder)):
        return
    started = datetime.now(UTC).isoformat(timespec="seconds")
    append_line(folder / COMMANDS, json.dumps(asdict(Command(started, line)), ensure_ascii=False))


def read_commands(folder: Path) -> list[Command]:
    """The commands of a sweep; none in folders without the file.

    A line that was cut short is left out.
    """
    commands = []
    with suppress(OSError):
        for line in (folder / COMMANDS).read_bytes().splitlines():
            with suppress(ValueError, TypeError):
                commands.append(Command(**json.loads(line)))
    return commands
