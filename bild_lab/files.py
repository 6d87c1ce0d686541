"""Where files are kept, hashing one, writing one so that a reader never sees half of it, and
locks.
"""

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml

from bild_lab.errors import UserError


def cache_folder() -> Path:
    """`$BILD_LAB_CACHE`, or `~/.cache/bild_lab` if it is unset or empty. Raises UserError where
    neither HOME nor the system's list of users says where that is, as in containers.
    """
    folder = os.environ.get("BILD_LAB_CACHE") or "~/.cache/bild_lab"
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"no home directory is known for the cache {folder}; export BILD_LAB_CACHE=DIR"
        ) from error


NOT_FILES = ("/dev", "/proc", "/sys")  # devices, and what the system says of itself


def existing_path(text: str, folder: Path) -> Path | None:
    """The file or folder that a text names, relative to this folder; None for a text that is no
    path.
    """
    try:
        path = folder / Path(text).expanduser()
        is_device = any(map(path.is_relative_to, NOT_FILES))
        return path if text.strip() and path.exists() and not is_device else None
    except (OSError, RuntimeError, ValueError):
        # too long for a path, a user that there is not, a zero byte
        return None


TOY = Path(__file__).parent / "toy"  # the toy pair and its corpus, which `make toy` makes


def shipped_folder(path: str) -> str:
    """The folder of `toy:large`, `toy:small` or `toy:corpus`, which the package holds; any other
    path as it is.

    Raises UserError for another name after `toy:`.
    """
    if not path.startswith("toy:"):
        return path
    folder = TOY / path.removeprefix("toy:")
    if path == "toy:" or not folder.is_dir():
        raise UserError(
            f"of the toy pair there are toy:large, toy:small and toy:corpus, got {path!r}"
        )
    return str(folder)


PINS = Path(__file__).parent / "pins.yaml"  # commits of the hub, which scripts/paper_run.py writes


def pin_of(kind: str, name: str, revision: str | None) -> Mapping[str, str] | None:
    """The commit ("revision") and the "date" that a repository of the hub is pinned to; None
    without a pin.

    kind: models or datasets. revision: as it was asked for; None: the main branch.
    """
    return _pins(PINS)[kind].get(hub_key(name, revision))


def hub_key(name: str, revision: str | None) -> str:
    """A repository of the hub as `pins.yaml` names it: ID, or ID@REVISION where one was named."""
    return name if revision is None else f"{name}@{revision}"


def forget_pins() -> None:
    """Read `pins.yaml` anew at the next question."""
    _pins.cache_clear()


@lru_cache(maxsize=1)
def _pins(file: Path) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    return yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)  # every value as text


LARGE_BYTES = 64 * 2**20  # bytes; of files from this size on the hash is remembered


def file_digest(file: Path) -> str:
    """A file's SHA-256, 64 hexadecimal digits. That of a large file is remembered with its path,
    size and times.

    A change of its content changes the time of its entry (`st_ctime`), also where its date is set
    back.
    """
    status, location = file.stat(), str(file.resolve())
    if status.st_size < LARGE_BYTES:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    facts = [location, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    remembered = (
        cache_folder() / "hashes" / f"{hashlib.sha256(location.encode()).hexdigest()[:16]}.json"
    )
    with suppress(OSError, ValueError, TypeError):  # none, or one that is damaged
        *remembered_facts, digest = json.loads(remembered.read_bytes())
        if remembered_facts == facts and len(bytes.fromhex(digest)) == hashlib.sha256().digest_size:
            return digest
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    with suppress(OSError):  # it is hashed again where the cache cannot be written
        write_atomically(remembered, json.dumps([*facts, digest]).encode())
    return digest


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file in the same folder, then put it in place in one step."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Inside the block a temporary file in the same folder, which the caller writes; after it the
    file is on disk, and becomes `path` in one step. An error leaves what was there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    temporary.open("xb").close()  # with the rights that the user's umask gives any file
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # else a power cut may leave the name without the content
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def json_text(content: Any) -> str:
    """JSON for a file that people read, too: indented, with an end of line."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Write `json_text` atomically."""
    write_atomically(path, json_text(content).encode())


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that several processes may add to, in one write.

    It begins on a line of its own, also after one that a killed process or a full disk cut short.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(length - 1, 0))
        last_byte = file.read(1)  # none of an empty file
        line_break = b"" if last_byte in (b"", b"\n") else b"\n"
        file.write(line_break + f"{line}\n".encode())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut, as `fsync` does for a file's content.

    Does nothing where the disk cannot, as some network disks and mounts of containers.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def holding(lock: Path, patience_s: float = 1.0) -> Iterator[None]:
    """Hold a lock on a file while the block runs. patience_s: how long to wait for another process
    that holds it; negative: until it ends.

    Runs the block without it after that, and where the disk has no locks or cannot be written.
    """
    from filelock import FileLock

    file_lock = FileLock(lock, fallback_to_soft=False)
    with suppress(OSError):  # also its Timeout
        file_lock.acquire(timeout=patience_s)
    try:
        yield
    finally:
        file_lock.release()


@dataclass(frozen=True)
class NamesFile:
    """Marks a parameter that names a file or a folder: its content, not its place, is part of a
    point's name.

    words: values of the parameter that name none.
    """

    words: tuple[str, ...] = ()


FilePath = Annotated[str, NamesFile()]
