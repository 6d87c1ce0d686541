"""The folder of a sweep: `points/HASH/{config.yaml,result.json,examples.jsonl}`; a repeated point
is in `HASH.2`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bild_lab.errors import UserError
from bild_lab.files import json_text, sync_folder, write_atomically, write_json
from bild_lab.lab.schema.columns import from_json, to_json
from bild_lab.lab.schema.examples import EXAMPLES, MeasuredExample
from bild_lab.lab.schema.result import Failure, FailureCause, Result
from bild_lab.lab.store.hashing import canonical_text

CONFIG, RESULT, FAILURE = "config.yaml", "result.json", "failed.json"
REMEMBERED = 4096  # results, of which a process reads each file once
LEAST_FREE_BYTES = 2**20  # free on the disk that results go to


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

    def newest(self, point: str) -> Result | None:
        """The point's last readable result; None if it has none.

        Earlier results are kept as well.
        """
        folders = [self.points / point, *self.points.glob(f"{point}.*")]
        return max(_readable(folders), key=_age, default=None)

    def write_point(
        self,
        point: str,
        config_yaml: str,
        result: Result,
        examples: Iterable[MeasuredExample],
        keep_both: bool = False,
        **further_files: Any,
    ) -> Path:
        """Store a finished point atomically. further_files: by their names, texts as they are and
        other values as JSON. Returns its folder.

        If another process has stored the point meanwhile, that one is kept and this one dropped;
        keep_both=True stores both. A stored point is never changed or removed.
        """
        self.points.mkdir(parents=True, exist_ok=True)
        files = {
            CONFIG: config_yaml,
            EXAMPLES: "".join(
                json.dumps(example.to_json(), ensure_ascii=False) + "\n" for example in examples
            ),
            **{
                name: file_content if isinstance(file_content, str) else json_text(file_content)
                for name, file_content in further_files.items()
            },
        }
        contents = {name: text.encode() for name, text in files.items()}
        contents[RESULT] = _result_json(replace(result, stored_at=self._stamp()))
        return self._publish(point, contents, keep_both)

    def adopt(self, result: Result) -> bool:
        """Copy another sweep's point here, whole or not at all.

        False where this sweep has it as new or newer.
        """
        present = self.newest(result.point)
        if present is not None and present.stored_at >= result.stored_at:
            return False
        self.points.mkdir(parents=True, exist_ok=True)
        files = {file.name: file.read_bytes() for file in sorted(result.folder.iterdir())}
        self._publish(result.point, files, keep_both=True)
        if result.stored_at:  # by a clock that may be ahead of ours
            self._stamp(after=result.stored_at)
        return True

    def show(self, result: Result, reported: Collection[str] = ()) -> Result:
        """A finished point as the newest of its policy and setting, which reports show.

        Where another was measured since, for example with a drafter that is no longer there, this
        one is stored once more. reported: points of the same command, each of which would else take
        the others' place at every resume.
        """
        names = tuple(sorted(folder.name for folder in self.points.iterdir()))
        shown = _shown(self.folder.resolve(), names)
        # a folder that was made anew in this process may have other settings than it had
        point, folder_name = shown.get(_identity(result), (result.point, result.folder.name))
        if folder_name == result.folder.name or point in reported:
            return result
        files = {file.name: file.read_bytes() for file in result.folder.iterdir() if file.is_file()}
        files[RESULT] = _result_json(replace(result, stored_at=self._stamp()))
        return read_result(self._publish(result.point, files, keep_both=True)) or result

    def write_failure(self, failure: Failure, config_yaml: str) -> Path:
        """Store why a point failed, in a folder that no finished point uses. Returns the folder."""
        folder = self.points / failure.point
        write_atomically(folder / CONFIG, config_yaml.encode())
        write_json(folder / FAILURE, to_json(failure))
        return folder

    def forget_failure(self, point: str) -> None:
        """Remove the record of an earlier failure of a point that has now succeeded."""
        shutil.rmtree(self.points / point, ignore_errors=True)

    def all_results(self) -> list[Result]:
        """Every readable result, oldest first; a point that was measured twice has two.

        Raises UserError for a result of a newer version of the package.
        """
        return sorted(_readable(file.parent for file in self._files(RESULT)), key=_age)

    def results(self) -> list[Result]:
        """Every finished point, oldest first.

        Of a point that was measured again, and of points with equal policy and setting, only the
        newest.
        """
        measurements = {result.point: result for result in self.all_results()}
        newest = {}  # measured again, for example with new weights
        for result in sorted(measurements.values(), key=_age):
            newest[_identity(result)] = result
        return list(newest.values())

    def finished(self) -> list[Result]:
        """The results of a folder that must have some. Raises UserError if it has none."""
        if not (results := self.results()):
            raise UserError(
                f"{self.folder} has no finished points; give the folder of a sweep, outputs/NAME"
            )
        return results

    def older(self) -> int:
        """How many results `results` leaves out because their point was measured again later."""
        return len(self.all_results()) - len(self.results())

    def failures(self) -> list[Failure]:
        """Every point whose last attempt failed, and every damaged result that has not been
        measured again.
        """
        failed = []
        for file in self._files(FAILURE):
            with suppress(OSError, ValueError):
                failed.append(from_json(Failure, json.loads(file.read_bytes())))
        damaged = [
            file
            for file in self._files(RESULT)
            if read_result(file.parent) is None and file.is_file()
        ]
        lost = [file for file in damaged if self.newest(file.parent.name.partition(".")[0]) is None]
        message = (
            "{} cannot be read: it was damaged after it was written; run the same sweep to measure"
            " it again"
        )
        causes = {file.parent.name: FailureCause("Damaged", message.format(file)) for file in lost}
        return failed + [Failure(point, "unknown", {}, cause) for point, cause in causes.items()]

    def report_lock(self) -> AbstractContextManager[None]:
        """Let only one process at a time read the points and write the report.

        If several processes finish together, the last one to write has then seen every point.
        """
        return self._locked(".report.lock", if_taken=None)

    def search_lock(self) -> AbstractContextManager[None]:
        """Let only one screening write its record here at a time.

        Raises UserError if another process does.
        """
        return self._locked(
            ".search.lock",
            if_taken=f"another process screens in {self.folder}; wait until it ends, or choose"
            " another name=NAME",
        )

    @contextmanager
    def _locked(self, name: str, if_taken: str | None) -> Iterator[None]:
        """Hold a lock of the sweep's folder. if_taken: the message of the UserError where another
        process has it; None: wait for it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / name, fallback_to_soft=False)
        try:
            lock.acquire(blocking=if_taken is None)
        except Timeout as error:
            raise UserError(if_taken) from error
        except OSError:  # a network folder without locks: the next run reports the rest
            pass
        try:
            yield
        except UserError:  # what was refused before anything was written leaves nothing to keep
            if [file.name for file in self.folder.iterdir()] == [name]:
                (self.folder / name).unlink()
            raise
        finally:
            lock.release()

    def _files(self, name: str) -> list[Path]:
        """The file with this name of every stored point.

        A folder whose name begins with a dot is unfinished.
        """
        files = self.folder.glob(f"points/*/{name}")
        return sorted(file for file in files if not file.parent.name.startswith("."))

    def _stamp(self, after: str = "") -> str:
        """The current time; just after the last stored point if the clock has been set back since.

        after: another time that it must be later than.
        """
        file, now = self.folder / ".latest", datetime.now(UTC)
        earlier = [after]
        with suppress(OSError, ValueError):  # the first point, or a damaged file
            earlier.append(file.read_text(encoding="utf-8"))
        for stamp in earlier:
            # no time, one without its zone, or the last that there is
            with suppress(ValueError, TypeError, OverflowError):
                now = max(now, datetime.fromisoformat(stamp) + timedelta(milliseconds=1))
        stamp = now.isoformat(timespec="milliseconds")
        write_atomically(file, stamp.encode())
        return stamp

    def _publish(self, point: str, files: dict[str, bytes], keep_both: bool) -> Path:
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
                if not keep_both and read_result(final) is not None:
                    return final
        finally:
            # it is gone already unless something went wrong
            shutil.rmtree(draft, ignore_errors=True)
        raise AssertionError("unreachable: there is always a next number")


def _identity(result: Result) -> str:
    """What points share of which reports show the newest."""
    identity = [result.policy, result.knobs, result.composition, result.setting]
    return canonical_text(to_json(identity))


@lru_cache(maxsize=4)
def _shown(folder: Path, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """The point that reports of a sweep show, and the name of its folder, by what `_identity` gives.

    names: of all folders of points, as a stored one never changes.
    """
    return {
        _identity(result): (result.point, result.folder.name) for result in Sweep(folder).results()
    }


def _result_json(result: Result) -> bytes:
    """The content of `result.json`."""
    return json_text(result.to_json()).encode()


def is_same_result(first: Result, second: Result) -> bool:
    """Whether all that is stored of two results is the same, but for when it was."""
    contents = [_result_json(replace(result, stored_at=None)) for result in (first, second)]
    return contents[0] == contents[1]


def _moved(draft: Path, final: Path) -> bool:
    """Rename a folder atomically. Returns False if the name is taken."""
    try:
        draft.rename(final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _readable(folders: Iterable[Path]) -> list[Result]:
    return [result for folder in folders if (result := read_result(folder)) is not None]


def read_result(folder: Path) -> Result | None:
    """The result in a point's folder; None if there is none, or if it was damaged after writing.

    Raises UserError for a newer version's.
    """
    try:
        status = (folder / RESULT).stat()
        # a stored point never changes, but for damage and by hand
        return _remembered_result(folder, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=REMEMBERED)
def _remembered_result(folder: Path, *_: int) -> Result | None:
    """As `read_result`, but raises OSError where the file cannot be read.

    Each report reads a sweep several times, and so does each point that is logged: a file that is
    as it was is read once in a process.
    """
    content = (folder / RESULT).read_bytes()
    try:
        return Result.from_json(json.loads(content), folder)
    except UserError:  # a newer version wrote it: do not measure it again
        raise
    except ValueError:
        return None


def _age(result: Result) -> tuple[str, str]:
    """A sort key that is greater for later results."""
    return result.stored_at or "", result.folder.name


def require_writable(folder: Path) -> None:
    """Raise UserError unless results can be written to the folder; leaves nothing behind."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"results go to {folder}, but {existing} is not a folder that can be written; choose"
            " name=NAME"
        )
    if (free := shutil.disk_usage(existing).free) < LEAST_FREE_BYTES:
        raise UserError(
            f"results go to {folder}, whose disk is full ({free:,} bytes free); "
            "make room, and the same command runs the rest"
        )
