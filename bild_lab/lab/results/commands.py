"""The commands that added to a sweep: `commands.jsonl` in its folder, a line per command, oldest first."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

COMMANDS = "commands.jsonl"


@dataclass(frozen=True)
class Command:
    """A command line, and when it was first given (ISO, UTC)."""

    started: str
    line: str


def record_command(folder: Path) -> None:
    """Add this process's command line to the sweep in `folder`, unless it is there: the same command resumes."""
    line = this_command()
    if any(one.line == line for one in read_commands(folder)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / COMMANDS).open("a", encoding="utf-8") as file:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(json.dumps(asdict(Command(started, line)), ensure_ascii=False) + "\n")


def read_commands(folder: Path) -> list[Command]:
    """The commands of a sweep; none in folders without the file. A line that was cut short is left out."""
    found = []
    with suppress(OSError):
        for line in (folder / COMMANDS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                found.append(Command(**json.loads(line)))
    return found


def this_command() -> str:
    """The command line of this process, as it can be typed again where it was typed."""
    script = Path(sys.argv[0])
    with suppress(ValueError):
        script = script.absolute().relative_to(Path.cwd())
    return shlex.join(["python", str(script), *sys.argv[1:]])
