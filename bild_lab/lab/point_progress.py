"""What a sweep shows while a point is measured: the point, its stage, its examples, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from bild_lab.lab.cli import console, stages
from bild_lab.lab.config import shipped_knobs
from bild_lab.lab.formatting import knob_label, short_name
from bild_lab.lab.point import Point
from bild_lab.lab.runner import DECODING
from bild_lab.lab.schema.timed import METHOD


class PointProgress:
    """Two or three lines on a terminal, which go when the block ends: the point, its stage, the sweep.

    place: of the point among `points`, from 1. typical_s: seconds that a point of this sweep takes; None if none was
    measured yet.
    """

    def __init__(self, title: str, examples: int, place: int = 1, points: int = 1, typical_s: float | None = None):
        self._examples, self._later, self._typical_s = examples, max(0, points - place), typical_s
        self._done, self._started_s, self._decoding_s = 0, time.perf_counter(), 0.0
        told = TextColumn("{task.fields[told]}")
        self._bars = Progress(TextColumn("{task.description}"), BarColumn(None), told, console=console, expand=True)
        self._stage = self._bars.add_task("", total=None, told="")
        self._sweep = None
        if points > 1:
            told = f"{place - 1}/{points}"
            self._sweep = self._bars.add_task("sweep", total=points, completed=place - 1, told=told)
            self._place = told
        lines = Group(Text(title, no_wrap=True, overflow="ellipsis"), self._bars)
        self._live = Live(lines, console=console, transient=True, refresh_per_second=4, redirect_stdout=False)

    def __enter__(self) -> PointProgress:
        stages.leave()
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._live.stop()

    def stage(self, name: str) -> None:
        """The point has reached this stage."""
        total, told = (self._examples, f"0/{self._examples}") if name == DECODING else (None, "")
        self._bars.reset(self._stage, description=name, total=total, told=told)
        self._decoding_s = time.perf_counter()

    def advance(self) -> None:
        """One example more is decoded."""
        self._done += 1
        now = time.perf_counter()
        left_s = (now - self._decoding_s) / self._done * (self._examples - self._done)
        told = f"{self._done}/{self._examples}, {remaining(left_s)}"
        self._bars.update(self._stage, completed=self._done, told=told)
        if self._sweep is not None:
            point_s = self._typical_s or now - self._started_s + left_s
            self._bars.update(self._sweep, told=f"{self._place}, {remaining(left_s + self._later * point_s)}")


def title_of(point: Point, place: int, points: int, overrides: Sequence[str]) -> str:
    """The point's place, policy and drafter, and the knobs that were given or differ from the policy's file."""
    given = {word.partition("=")[0].lstrip("+") for word in overrides}
    usual = shipped_knobs(point.policy) or {}
    knobs = [knob for knob, value in point.knobs.items() if f"policy.{knob}" in given or usual.get(knob, ...) != value]
    drafters = [f"drafter {short_name(model.checkpoint.path)}" for model in point.decoders[METHOD].models[1:]]
    number = f"{place}/{points} " if points > 1 else ""
    return number + ", ".join(filter(None, [point.policy, *drafters, knob_label(point, knobs, " ")]))


def remaining(seconds: float) -> str:
    """The time left in words: `40 s left`, `3 min left`, `2 h 5 min left`."""
    if seconds < 60:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min left"
