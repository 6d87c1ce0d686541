"""How far the last command of a sweep came: `.course.json` in its folder, beside a lock that its process holds."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bild_lab.files import holding, is_held, write_atomically
from bild_lab.lab.schema.json_values import from_json, to_json

COURSE, _LOCK = ".course.json", ".course.lock"


@dataclass(frozen=True)
class Course:
    """What a command wants to measure in a folder, and how much of it is done.

    total: None if it is not known, as in a search. done: points that were measured, found finished or failed; None
    where other processes measure them. ended: whether the command came to its end. One that was stopped or killed did
    not.
    """

    total: int | None
    done: int | None = 0
    ended: bool = False

    @property
    def told(self) -> str:
        """`3 of 9 points`; `3 points so far` where the total is not known."""
        count = self.done if self.total is None else self.total
        points = f"{count} point{'' if count == 1 else 's'}"
        if self.total is None:
            return f"{points} so far"
        return points if self.done is None else f"{self.done} of {points}"


class RunningCourse:
    """The course of this process's command, on the disk while it runs. counts: whether this process measures."""

    def __init__(self, folder: Path, total: int | None, counts: bool = True) -> None:
        self._folder, self._held = folder, ExitStack()
        self._course = Course(total, 0 if counts else None)
        self._write()
        self._held.enter_context(holding(folder / _LOCK))

    @property
    def told(self) -> str:
        """How far it is, in words."""
        return self._course.told

    def advance(self) -> None:
        """One point more is done."""
        if self._course.done is not None:
            self._course = replace(self._course, done=self._course.done + 1)
            self._write()

    def stop(self, ended: bool) -> None:
        """The process works no more on it. ended: whether every point had its turn."""
        self._course = replace(self._course, ended=ended)
        self._write()
        self._held.close()

    def _write(self) -> None:
        with suppress(OSError):  # a full disk is told by the point that cannot be stored
            write_atomically(self._folder / COURSE, json.dumps(to_json(self._course)).encode())


def read_course(folder: Path) -> tuple[Course, bool] | None:
    """The course of the last command, and whether its process still runs; None if it is not known."""
    try:
        course = from_json(Course, json.loads((folder / COURSE).read_bytes()))
    except (OSError, ValueError):
        return None
    return course, not course.ended and is_held(folder / _LOCK)
