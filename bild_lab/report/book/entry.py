"""What the lab book shows of a folder. Entries are kept as JSON between two writings, so they hold plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SWEEP, SCREENING, TRAINING, COMPARISON, FIGURE, OTHER = KINDS = (
    "sweep",
    "screening",
    "training",
    "comparison",
    "figure",
    "other",
)
FINISHED, RUNNING, INTERRUPTED, FAILED, DAMAGED = STATES = (
    "finished",
    "running",
    "interrupted",
    "failed",
    "damaged",
)
WIDTH, HEIGHT = 168.0, 104.0  # of a picture, in its own units


@dataclass(frozen=True)
class Line:
    """A line of a picture, through corners of x and y. role: "front", "base", "curve" or "interval", for book.css."""

    role: str
    corners: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Dot:
    """A mark of a picture. strong: whether it stands out, as those on the front do."""

    x: float
    y: float
    colour: str
    strong: bool = True


@dataclass(frozen=True)
class Picture:
    """A small drawing of numbers; y grows downwards. label: what it shows, in words."""

    label: str
    lines: Sequence[Line] = ()
    dots: Sequence[Dot] = ()


@dataclass(frozen=True)
class Link:
    """A file to open. path: below outputs."""

    words: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder of outputs, or one figure in a folder of figures.

    name: of the folder, or FOLDER/FIGURE. state: one of STATES. progress: the state in words, such as "3 of 9 points".
    date: when it was finished, or written to last, as ISO date and time with its zone. image: a picture file below
    outputs, where there is one and no `picture`. sides: the two folders of a comparison. settings, points: what two
    sweeps are compared by on the page; `points_left_out` are not among the points, as they would make it too large.
    """

    name: str
    kind: str
    headline: str
    pair: str = ""
    data: str = ""
    date: str = ""
    state: str = FINISHED
    progress: str = ""
    size_bytes: int = 0
    links: Sequence[Link] = ()
    picture: Picture | None = None
    image: str = ""
    sides: Sequence[str] = ()
    settings: Sequence[Mapping[str, Any]] = ()
    points: Sequence[Mapping[str, Any]] = ()
    points_left_out: int = 0

    @property
    def told_state(self) -> str:
        """The state as shown: with its progress, unless it is finished without a remark."""
        if not self.progress:
            return self.state
        return self.progress if self.state == DAMAGED else f"{self.state}, {self.progress}"
