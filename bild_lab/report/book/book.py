"""Reads every folder of outputs, and writes the page over all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Template

import bild_lab
from bild_lab.errors import UserError
from bild_lab.files import holding, write_atomically
from bild_lab.lab.formatting import MISSING, number
from bild_lab.lab.schema.json_values import from_json, to_json
from bild_lab.report.book.entry import (
    COMPARISON,
    DAMAGED,
    HEIGHT,
    INTERRUPTED,
    KINDS,
    RUNNING,
    STATES,
    WIDTH,
    Entry,
    Link,
)
from bild_lab.report.book.folders import METRICS, reader_of
from bild_lab.report.book.listing import Listing, listed
from bild_lab.report.page.templates import page_environment

PAGE = "index.html"
_KEPT, _LOCK = ".lab_book.json", ".lab_book.lock"
_LINKS = {  # what is worth opening in a folder, the first of them by its name
    "report.html": "report",
    "compare.html": "comparison",
    "pareto.png": "picture",
    "sweep.csv": "table",
    "compare.csv": "table",
    "match_rates.csv": "table",
    "screen.csv": "screened points",
    METRICS: "metrics",
    "bench.json": "numbers",
}
TITLES = dict(
    zip(
        KINDS,
        ("Sweeps", "Screenings and searches", "Trainings", "Comparisons", "Figures", "Data and other measurements"),
        strict=True,
    )
)


@dataclass(frozen=True)
class _Kept:
    """What was read of a folder when its files were last as `mark` says."""

    mark: str
    entries: Sequence[Entry]


@dataclass(frozen=True)
class _Memory:
    """Everything that was read before. code: of the package that read it."""

    code: str
    folders: dict[str, _Kept]


def write_book(outputs: Path) -> list[Entry]:
    """Write `index.html` into outputs, whole or not at all. Returns its entries, the newest first.

    Folders whose files have not changed since are not read again. Everything that came from outside the package is
    escaped. Raises UserError if the page cannot be written.
    """
    with holding(outputs / _LOCK):  # of several processes that end together, the last one has seen all folders
        entries = read_entries(outputs)
        text = _template().render(
            entries=entries,
            sections=[(kind, TITLES[kind], found) for kind in KINDS if (found := of_kind(entries, kind))],
            states=[state for state in STATES if any(one.state == state for one in entries)],
            size=(WIDTH, HEIGHT),
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            compared=_comparable(outputs, entries),
            words=_words,
            target=_target,
            day=day,
            bytes=told_bytes,
        )
        write_atomically(outputs / PAGE, text.encode(errors="replace"))
    return entries


def _template() -> Template:
    templates = page_environment()
    templates.filters["href"] = lambda path: quote(os.fsencode(path))
    return templates.get_template("book.html.j2")


def _comparable(outputs: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    """What the page compares two sweeps by, and the comparisons that were made."""
    keys = ("name", "settings", "points", "points_left_out")
    return {
        "outputs": outputs.as_posix(),
        "sweeps": [{key: to_json(getattr(one, key)) for key in keys} for one in entries if one.points],
        "comparisons": [
            {"name": one.name, "sides": [Path(side).name for side in one.sides], "path": quote(one.links[0].path)}
            for one in entries
            if one.kind == COMPARISON and one.links
        ],
    }


def matching(entries: Sequence[Entry], words: Sequence[str]) -> list[Entry]:
    """The entries that contain all of the words, in whatever case."""
    return [one for one in entries if all(word.lower() in _words(one).lower() for word in words)]


def _target(entry: Entry) -> str:
    """What a click on the entry opens: its report if there is one, else its folder."""
    return entry.links[0].path if entry.links else f"{entry.name}/"


def _words(entry: Entry) -> str:
    """What the filter looks in."""
    policies = dict.fromkeys(str(point["policy"]) for point in entry.points)
    return " ".join([entry.name, entry.kind, entry.headline, entry.pair, entry.data, entry.told_state, *policies])


def day(date: str) -> str:
    """An entry's date to the minute, in this machine's zone."""
    return datetime.fromisoformat(date).astimezone().strftime("%Y-%m-%d %H:%M") if date else MISSING


def told_bytes(count: int) -> str:
    """A size in the unit that reads best."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{number(count / size, 1)} {unit}"
    return f"{count} bytes"


def of_kind(entries: Sequence[Entry], kind: str) -> list[Entry]:
    """The entries of a kind, in their order."""
    return [one for one in entries if one.kind == kind]


def read_entries(outputs: Path) -> list[Entry]:
    """An entry of every folder, and of every figure, the newest first."""
    code = listed(Path(bild_lab.__file__).parent, ("__pycache__",)).mark
    before = _remembered(outputs / _KEPT, code)
    folders: dict[str, _Kept] = {}
    for folder in sorted(outputs.iterdir()):
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        listing = listed(folder)
        known = before.get(folder.name)
        if known is None or known.mark != listing.mark or _may_change(known.entries):
            known = _Kept(listing.mark, _read(folder, listing))
        folders[folder.name] = known
    if folders != before:
        with suppress(OSError):
            write_atomically(outputs / _KEPT, json.dumps(to_json(_Memory(code, folders))).encode())
    entries = [entry for known in folders.values() for entry in known.entries]
    return sorted(entries, key=lambda entry: entry.date, reverse=True)


def _may_change(entries: Sequence[Entry]) -> bool:
    """Whether an entry depends on more than files: on whether a process runs."""
    return any(entry.state in (RUNNING, INTERRUPTED) for entry in entries)


def _remembered(file: Path, code: str) -> dict[str, _Kept]:
    try:
        memory = from_json(_Memory, json.loads(file.read_bytes()))
    except (OSError, ValueError):
        return {}
    return dict(memory.folders) if memory.code == code else {}


def _read(folder: Path, listing: Listing) -> list[Entry]:
    """The folder's entries. One that cannot be read is an entry that says so."""
    reader = reader_of(folder)
    try:
        entries = reader.read(folder)
    except Exception as error:  # whatever the files contain, the other folders are shown
        reason = " ".join(str(error).split())
        told = reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"
        entries = [Entry(name=folder.name, kind=reader.kind, headline=f"Cannot be read: {told:.300}", state=DAMAGED)]
    return [
        replace(
            entry,
            date=_utc(entry.date) or listing.written,
            size_bytes=entry.size_bytes or listing.size_bytes,
            links=entry.links or _links(folder),
        )
        for entry in entries
    ]


def _links(folder: Path) -> list[Link]:
    return [Link(words, f"{folder.name}/{file}") for file, words in _LINKS.items() if (folder / file).is_file()]


def _utc(stamp: str) -> str:
    """An ISO date and time with its zone, in UTC to the second, so that dates sort as text; empty if it is none."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return ""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="seconds")
