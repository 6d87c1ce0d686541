"""The folder of a sweep: `points/HASH/{config.yaml,result.json,examples.jsonl}`, measured again `points/HASH.2/…`."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bild_lab.errors import UserError
from bild_lab.files import sync_folder, write_atomically
from bild_lab.lab.hashing import plain_numbers

RESULT, FAILURE = "result.json", "failed.json"
LEAST_FREE_BYTES = 2**20  # of the disk that results go to


@dataclass(frozen=True)
class Measurement:
    """One finished measurement of a point: its folder, and the result that lies there."""

    folder: Path
    result: dict[str, Any]

    @property
    def point(self) -> str:
        return self.folder.name.partition(".")[0]

    @cached_property
    def order(self) -> tuple[str, int, str]:
        """Later measurements are greater, also where the clock was set back in between."""
        number = self.folder.name.partition(".")[2]
        stored = self.result.get("stored") or self.result.get("environment", {}).get("started", "")
        return (stored, int(number) if number.isdigit() else 1, self.point)


@dataclass(frozen=True)
class Sweep:
    """Everything that was measured under one name."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def points(self) -> Path:
        return self.folder / "points"

    def finished(self, point: str) -> dict[str, Any] | None:
        """The point's newest result, if it has one that can be read."""
        newest = self.newest(point)
        return None if newest is None else newest.result

    def newest(self, point: str) -> Measurement | None:
        """The point's last finished measurement; the others are kept beside it."""
        folders = [self.points / point, *self.points.glob(f"{point}.*")]
        return max(_measurements(folders), key=lambda one: one.order, default=None)

    def write_point(
        self,
        point: str,
        config_yaml: str,
        result: dict[str, Any],
        examples: Iterable[dict[str, Any]],
        beside: bool = False,
    ) -> Path:
        """Store a finished point; it appears whole or not at all. Returns its folder.

        Where the point is there already, because somebody else was faster, that one stands; beside=True
        stores this measurement next to it. Nothing that was stored is ever changed or removed.
        """
        self.points.mkdir(parents=True, exist_ok=True)
        stored = {**result, "stored": self._stamp()}
        files = {
            "config.yaml": config_yaml,
            "examples.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in examples),
            RESULT: json.dumps(finite(stored), indent=2, ensure_ascii=False) + "\n",
        }
        return self._publish(point, {name: content.encode() for name, content in files.items()}, beside)

    def adopt(self, measurement: Measurement) -> bool:
        """Copy another sweep's measurement here, whole or not at all.

        False where this sweep has a measurement of the point that is as new.
        """
        present = self.newest(measurement.point)
        if present is not None and present.order[:1] >= measurement.order[:1]:
            return False
        self.points.mkdir(parents=True, exist_ok=True)
        files = {file.name: file.read_bytes() for file in sorted(measurement.folder.iterdir())}
        self._publish(measurement.point, files, beside=True)
        return True

    def write_failure(self, point: str, config_yaml: str, failure: dict[str, Any]) -> Path:
        """Store why a point failed, under a name that no finished point has."""
        folder = self.points / point
        write_atomically(folder / "config.yaml", config_yaml.encode())
        write_atomically(folder / FAILURE, (json.dumps(finite(failure), indent=2) + "\n").encode())
        return folder

    def forget_failure(self, point: str) -> None:
        """Remove what an earlier try of a point left, now that it has succeeded."""
        shutil.rmtree(self.points / point, ignore_errors=True)

    def measurements(self) -> list[Measurement]:
        """Every finished measurement that can be read, oldest first."""
        folders = [file.parent for file in self._files(RESULT)]
        return sorted(_measurements(folders), key=lambda one: one.order)

    def results(self) -> list[dict[str, Any]]:
        """Every finished point, oldest first; of points alike in policy and setting the newest.

        `folder` in a result is the name of the folder that it lies in.
        """
        newest = {_identity(one.result): one for one in self.measurements()}  # measured anew, say with new weights
        return [{**one.result, "folder": one.folder.name} for one in newest.values()]

    def older(self) -> int:
        """How many measurements `results` leaves out, as the same was measured again later."""
        found = self.measurements()
        return len(found) - len({_identity(one.result) for one in found})

    def failures(self) -> list[dict[str, Any]]:
        """Every point whose last try failed, and every result that cannot be read and has not been measured again."""
        failed = [failure for file in self._files(FAILURE) if (failure := _read(file)) is not None]
        damaged = [file for file in self._files(RESULT) if _read(file) is None and file.is_file()]
        return failed + [_damage(file) for file in damaged if self.finished(file.parent.name.partition(".")[0]) is None]

    def examples(self, point: str) -> list[dict[str, Any]]:
        """A finished point's examples, in order, of its newest measurement."""
        newest = self.newest(point)
        folder = self.points / point if newest is None else newest.folder
        text = (folder / "examples.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.split("\n") if line]

    @contextmanager
    def report_lock(self) -> Iterator[None]:
        """Let one process at a time read the points and write the report of them.

        Of several that finish together, the last to write has then seen every point.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".report.lock", fallback_to_soft=False)
        with suppress(OSError):  # a network folder without locks: the next run reports the rest
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def search_lock(self) -> Iterator[None]:
        """Let one search of knobs at a time go on here. Raises UserError where another process has one.

        A second one would take the first one's trial for that of a killed process, and measure it too.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".search.lock", fallback_to_soft=False)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise UserError(
                f"another process searches in {self.folder}; wait until it ends, or choose another name=NAME"
            ) from error
        except OSError:  # a network folder without locks
            pass
        try:
            yield
        finally:
            lock.release()

    def _files(self, name: str) -> list[Path]:
        """That file of every published point; a folder with a dot in front was never finished."""
        found = self.folder.glob(f"points/*/{name}")
        return sorted(file for file in found if not file.parent.name.startswith("."))

    def _stamp(self) -> str:
        """The time, or just after the last point stored here where the clock was set back since."""
        file, now = self.folder / ".latest", datetime.now(UTC)
        with suppress(OSError, ValueError):  # the first point, or a file that somebody else damaged
            now = max(now, datetime.fromisoformat(file.read_text()) + timedelta(milliseconds=1))
        stamp = now.isoformat(timespec="milliseconds")
        write_atomically(file, stamp.encode())
        return stamp

    def _publish(self, point: str, files: dict[str, bytes], beside: bool) -> Path:
        draft = self.points / f".{point}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        draft.mkdir()
        try:
            for name, content in files.items():
                with (draft / name).open("wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
            sync_folder(draft)
            for number in count(1):
                final = self.points / (point if number == 1 else f"{point}.{number}")
                if _moved(draft, final):
                    sync_folder(self.points)
                    return final
                if not beside and _read(final / RESULT) is not None:
                    return final
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # gone already, unless something went wrong
        raise AssertionError("unreachable: there is always a next number")


def _moved(draft: Path, final: Path) -> bool:
    """Rename a folder in one step; False where the name is taken."""
    try:
        draft.rename(final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _measurements(folders: Iterable[Path]) -> list[Measurement]:
    read = [(folder, _read(folder / RESULT)) for folder in folders]
    return [Measurement(folder, result) for folder, result in read if result is not None]


def _read(file: Path) -> dict[str, Any] | None:
    """A record, or None where it is not there or damaged; ours are written whole, but disks and copies fail."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _damage(file: Path) -> dict[str, Any]:
    message = f"{file} cannot be read: it was damaged after it was written; run the same sweep to measure it again"
    error = {"type": "Damaged", "message": message, "traceback": ""}
    return {"point": file.parent.name, "policy": "unknown", "knobs": {}, "error": error}


def _identity(result: dict[str, Any]) -> str:
    keys = ("policy", "knobs", "composition", "setting")
    return json.dumps(plain_numbers({key: result.get(key) for key in keys}), sort_keys=True)


def require_writable(folder: Path) -> None:
    """Raise UserError unless results can be written there; creates nothing that stays."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"results go to {folder}, but {existing} is not a folder that can be written; choose name=NAME")
    if (free := shutil.disk_usage(existing).free) < LEAST_FREE_BYTES:
        raise UserError(
            f"results go to {folder}, whose disk is full ({free:,} bytes free); "
            "make room, and the same command runs the rest"
        )


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: NaN becomes null, infinity its name."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
